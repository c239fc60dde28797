"""What one engine holds, by the places of its texts, from the events of its store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kvboost.core import TOKEN_BYTES
from kvboost.routing import places
from kvboost.routing.book import ALL_NAMES, Report

# What is read of the text before a chunk, so that the places where the two meet are found as well.
# It has to give `places.SHORTEST` bytes, and does unless tokens are shorter than three.
TAIL_BYTES = 64 * TOKEN_BYTES


class Held:
    """The chunks that an engine holds. Thread-safe; only `report` takes time."""

    def __init__(self, text_of_tokens: Callable[[bytes], bytes], max_places: int = 1 << 14) -> None:
        """Read tokens by `text_of_tokens`, from little-endian u32 to UTF-8, when they are reported.

        A report has at most `max_places`, those with the smallest names: 128 KiB, sent to every
        router.
        """
        self._text_of_tokens = text_of_tokens
        self._max_places = max_places
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._chunks: dict[bytes, tuple[bytes, bytes | None]] = {}  # key -> tokens, parent
        self._names: dict[bytes, bytes] = {}  # of the chunks that were read

    def added(self, key: bytes, tokens: bytes, parent: bytes | None = None) -> None:
        """A chunk is held now; `parent` is the key of the one before it."""
        with self._lock:
            self._chunks.setdefault(key, (tokens, parent))

    def removed(self, key: bytes) -> None:
        """A chunk is not held any more."""
        with self._lock:
            self._chunks.pop(key, None)
            self._names.pop(key, None)

    def cleared(self) -> None:
        """Nothing is held any more."""
        with self._lock:
            self._chunks.clear()
            self._names.clear()

    def report(self) -> Report:
        """The places of all that is held; reads what is new first."""
        with self._reporting:
            with self._lock:
                unread = {
                    key: (chunk, self._tail_before(key))
                    for key, chunk in self._chunks.items()
                    if key not in self._names
                }
            read = {
                key: places.find(self._text_of_tokens(tail + chunk[0])).tobytes()
                for key, (chunk, tail) in unread.items()
            }
            with self._lock:
                for key, names_of_one in read.items():
                    if self._chunks.get(key) is unread[key][0]:
                        self._names[key] = names_of_one
                held = b"".join(self._names.values())
        names = np.unique(np.frombuffer(held, np.uint64))
        if len(names) <= self._max_places:
            return Report(ALL_NAMES, names)
        kept = names[: self._max_places]
        return Report(int(kept[-1]), kept)

    def _tail_before(self, key: bytes) -> bytes:
        """The last tokens of what stands before a chunk, as far as that is held."""
        tail, before = b"", self._chunks[key][1]
        while before is not None and before in self._chunks and len(tail) < TAIL_BYTES:
            tokens, parent = self._chunks[before]
            tail, before = tokens + tail, parent
        return tail[-TAIL_BYTES:]
