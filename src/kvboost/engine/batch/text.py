"""Tokens of an answer -> its text, as it comes and up to a stop text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN = "�"  # what tokenizers make of bytes that are no whole character yet
MOST_OPEN = 64  # tokens; a character has four bytes at most, so these will never be one


class TextReader:
    """Gives out text once it can no longer change; never a part of a stop text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        # Some tokens read differently after others, so new text is what a few tokens say more
        # than those before them.
        self._from, self._read = 0, 0
        self._held = ""  # may be the beginning of a stop text
        self.is_stopped = False

    def feed(self, token: int) -> str:
        """Text that is certain after one more token."""
        self._tokens.append(token)
        known = self._decode(self._from, self._read)
        text = self._decode(self._from, len(self._tokens))
        if text == known:
            self._tokens.pop()  # it says nothing; many of them would be decoded again and again
            return ""
        is_open = text.endswith(OPEN) and len(self._tokens) - self._read < MOST_OPEN
        if len(text) <= len(known) or is_open:
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return self._up_to_stop(text[len(known) :])

    def finish(self) -> str:
        """The rest, once no token follows."""
        if self.is_stopped:
            return ""
        known = self._decode(self._from, self._read)
        rest = self._decode(self._from, len(self._tokens))[len(known) :]
        text = self._up_to_stop(rest)
        return text if self.is_stopped else text + self._held

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)
        return text

    def _up_to_stop(self, new: str) -> str:
        text = self._held + new
        self._held = ""
        found = [(place + len(s), place) for s in self._stop if (place := text.find(s)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)[1]]  # the first that is complete, wherever tokens end
        for length in range(min(len(text), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                self._held = text[-length:]
                return text[:-length]
        return text
