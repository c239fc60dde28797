"""The company of stored text: how much of what stood before it stands in this prompt, too.

K/V depends on everything before it. A copy that was computed after the same documents in another
order is nearer to a full prefill than one that was computed after strangers, and it carries
nothing that the prompt does not say itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from kvboost.core import TOKEN_BYTES, Entry, FrameKey, Match, Provenance
from kvboost.tiers.index import ChunkIndex

WINDOW = 4  # tokens; a token is in the prompt if a window around it is
_WINDOW_BYTES, _MARGIN = WINDOW * TOKEN_BYTES, (WINDOW - 1) * TOKEN_BYTES


class Company:
    """Counts the tokens before stored chunks that a prompt does not have. For one lookup."""

    def __init__(self, text: bytes, index: ChunkIndex) -> None:
        self._text, self._index = text, index
        self._strangers: dict[FrameKey, float] = {}  # before a chunk

    @cached_property
    def _windows(self) -> set[bytes]:
        return set(_windows_of(self._text))

    def strangers(self, match: Match) -> float:
        """Tokens before a stored text that are not in the prompt.

        Infinite if a chunk before it has left the store, or if any of this is approximate.
        """
        entry = self._index.get(match.key)
        if entry is None or (before := self.before(entry)) == math.inf:
            return math.inf
        stop = match.offset * TOKEN_BYTES
        return before + self._missing(entry, entry.tokens[:stop], entry.tokens[stop:])

    def before(self, entry: Entry) -> float:
        """Strangers before an entry's first token."""
        chain = [entry]
        while (last := chain[-1]).key not in self._strangers:
            parent = self._index.before(last)
            is_known = last.provenance is Provenance.EXACT
            if is_known and parent is not None and parent.home + parent.num_tokens == last.home:
                chain.append(parent)
            else:
                self._strangers[last.key] = 0 if is_known and last.home == 0 else math.inf
        while len(chain) > 1:
            parent, child = chain.pop(), chain[-1]
            missing = self._missing(parent, parent.tokens, child.tokens)
            self._strangers[child.key] = self._strangers[parent.key] + missing
        return self._strangers[entry.key]

    def _missing(self, entry: Entry, said: bytes, right: bytes) -> int:
        """Tokens of `said`, the first ones of an entry, that are in no window of the prompt."""
        before = self._index.before(entry)
        left = b"" if before is None else before.tokens[-_MARGIN:]
        text = left + said + right[:_MARGIN]
        found = [window in self._windows for window in _windows_of(text)]
        num_left, num_said = len(left) // TOKEN_BYTES, len(said) // TOKEN_BYTES
        if not any(found):
            return num_said
        if all(found):
            return 0
        last = range(num_left, num_left + num_said)
        return sum(not any(found[max(0, at - WINDOW + 1) : at + 1]) for at in last)


def _windows_of(text: bytes) -> Iterator[bytes]:
    last = len(text) - _WINDOW_BYTES
    return (text[i : i + _WINDOW_BYTES] for i in range(0, last + 1, TOKEN_BYTES))
