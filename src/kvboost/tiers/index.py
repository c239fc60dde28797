"""What is stored: finds a chunk by its key, or the nearest chunk with the same history."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from kvboost.core import TOKEN_BYTES, Entry, PrefixKey


class ChunkIndex:
    """Entries by prefix key and, sorted by their tokens, by parent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[PrefixKey, Entry] = {}
        # Sorted, so that the chunk that shares most with given tokens is next to where they'd go.
        self._children: defaultdict[PrefixKey, list[tuple[bytes, PrefixKey]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: PrefixKey) -> Entry | None:
        """The entry stored under `key`."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Make an exact entry findable."""
        assert entry.prefix is not None and entry.parent is not None
        with self._lock:
            if entry.prefix not in self._entries:
                insort(self._children[entry.parent], (entry.tokens, entry.prefix))
            self._entries[entry.prefix] = entry

    def remove(self, key: PrefixKey) -> None:
        """Forget an entry if it is there; what builds on it is out of reach until it is back."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None or entry.parent is None:
                return
            siblings = self._children[entry.parent]
            del siblings[bisect_left(siblings, (entry.tokens, key))]
            if not siblings:
                del self._children[entry.parent]

    def nearest_child(self, parent: PrefixKey, tokens: bytes) -> tuple[Entry | None, int]:
        """The chunk after `parent` that shares most leading tokens with `tokens`, and how many."""
        best: tuple[Entry | None, int] = (None, 0)
        with self._lock:
            siblings = self._children.get(parent, [])
            place = bisect_left(siblings, (tokens,))
            for candidate, key in siblings[max(0, place - 1) : place + 1]:
                num_shared = _num_shared_tokens(candidate, tokens)
                if num_shared > best[1]:
                    best = (self._entries[key], num_shared)
        return best

    def has_extension(self, parent: PrefixKey, tokens: bytes) -> bool:
        """Whether a chunk after `parent` starts with all of `tokens`."""
        entry, _ = self.nearest_child(parent, tokens)
        return entry is not None and entry.tokens.startswith(tokens)

    def childless_head(self, parent: PrefixKey, tokens: bytes) -> PrefixKey | None:
        """The chunk sorted just before `tokens`, if it is their head and nothing builds on it."""
        with self._lock:
            siblings = self._children.get(parent, [])
            place = bisect_left(siblings, (tokens,))
            if place == 0:
                return None
            candidate, key = siblings[place - 1]
            return key if tokens.startswith(candidate) and key not in self._children else None


def _num_shared_tokens(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right)) // TOKEN_BYTES
    a, b = (np.frombuffer(side, dtype="<u4", count=length) for side in (left, right))
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length
