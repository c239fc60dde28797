"""Text of an output while it is generated: from tokens to text, and from the engine to callers."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from kvboost.engine.results import GenerationResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN = "�"  # tokenizers' output for an incomplete character
MOST_OPEN = 64  # tokens; a character has four bytes at most, so these will never be one

Event = str | GenerationResult | BaseException
Start = Callable[[Callable[[Event], None], threading.Event], None]
"""Called with (put, cancelled): puts text, and at the end the result or an error."""


class TextStream(Iterator[str]):
    """An iterator over pieces of text; afterwards `result` is the whole `GenerationResult`.

    Generation runs ahead of the reader, and stops soon after the stream is closed or deleted. An
    error of the request is raised in place of the next piece. `result` is None until the last
    piece was read. As a context manager it closes itself.

    Example:
        >>> with engine.stream("The capital of France is", max_new_tokens=2) as stream:
        ...     text = "".join(stream)
        >>> text, stream.result.prompt_tokens
        (' Paris.', 5)
    """

    def __init__(self, start: Start) -> None:
        self.result: GenerationResult | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._is_over = False
        start(self._events.put, self._cancelled)

    def __next__(self) -> str:
        if self._is_over:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, str):
            return event
        self._is_over = True
        if isinstance(event, BaseException):
            raise event
        self.result = event
        raise StopIteration

    def close(self) -> None:
        """Stop generating; later pieces are dropped and `result` stays None.

        Example:
            >>> stream = engine.stream("Once upon a time", max_new_tokens=1000)
            >>> piece = next(stream)
            >>> stream.close()
            >>> list(stream), stream.result
            ([], None)
        """
        self._cancelled.set()
        self._is_over = True

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._cancelled.set()


async def text_of(start: Start) -> AsyncIterator[str]:
    """The same for asyncio: no thread waits, and leaving the loop stops the generation."""
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def put(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        await loop.run_in_executor(None, start, put, cancelled)  # it may wait for a place
        while isinstance(event := await events.get(), str):
            yield event
        if isinstance(event, BaseException):
            raise event
    finally:
        cancelled.set()


class TextReader:
    """Incremental detokenizer: returns text once it cannot change, but no part of a stop text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        # Tokens may decode differently after others, so new text is the difference between
        # decoding the last known tokens with and without the new ones.
        self._from, self._read = 0, 0
        self._held = ""  # may be the beginning of a stop text
        self.is_stopped = False

    def feed(self, token: int) -> str:
        """Text that is certain after one more token."""
        self._tokens.append(token)
        known = self._decode(self._from, self._read)
        text = self._decode(self._from, len(self._tokens))
        if text == known:
            self._tokens.pop()  # without text; many of them would be decoded again and again
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
