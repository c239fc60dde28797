"""What one engine holds, by the anchors of its texts, from the events of its store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kvboost.core import TOKEN_BYTES
from kvboost.routing import anchors
from kvboost.routing.book import ALL_NAMES, Report

# What is read of the text before a chunk, so that the anchors where the two meet are found as well.
# It has to give `anchors.SHORTEST` bytes, and does unless tokens are shorter than three.
TAIL_BYTES = 64 * TOKEN_BYTES
MOST_READ = 2000  # chunks for one report, a second or so; the rest waits for the next


class Held:
    """The chunks that an engine holds. Thread-safe; only `report` takes time."""

    def __init__(
        self, text_of_tokens: Callable[[bytes], bytes], max_anchors: int = 1 << 14
    ) -> None:
        """Read tokens by `text_of_tokens`, from little-endian u32 to UTF-8, when they are reported.

        A report has at most `max_anchors`, those with the smallest names: 128 KiB, sent to every
        router.
        """
        self._text_of_tokens = text_of_tokens
        self._max_anchors = max_anchors
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._chunks: dict[bytes, tuple[bytes, bytes | None]] = {}  # key -> tokens, parent
        self._unread: dict[bytes, None] = {}  # the newest last
        self._names: dict[bytes, bytes] = {}  # of the chunks that were read
        self._last = Report(ALL_NAMES, np.empty(0, np.uint64))

    def added(self, key: bytes, tokens: bytes, parent: bytes | None = None) -> None:
        """A chunk is held now; `parent` is the key of the one before it."""
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = (tokens, parent)
                self._unread[key] = None

    def removed(self, key: bytes) -> None:
        """A chunk is not held any more."""
        with self._lock:
            for each in (self._chunks, self._unread, self._names):
                each.pop(key, None)

    def cleared(self) -> None:
        """Nothing is held any more."""
        with self._lock:
            for each in (self._chunks, self._unread, self._names):
                each.clear()

    def report(self) -> Report:
        """The anchors of what is held, as far as it was read: the newest of what is new first."""
        if not self._reporting.acquire(blocking=False):
            return self._last
        try:
            self._read_new()
            with self._lock:
                held = list(self._names.values())
            names = np.unique(np.frombuffer(b"".join(held), np.uint64))
            kept = names[: self._max_anchors]
            limit = ALL_NAMES if len(kept) == len(names) else int(kept[-1])
            self._last = Report(limit, kept)
            return self._last
        finally:
            self._reporting.release()

    def _read_new(self) -> None:
        texts: dict[bytes, bytes] = {}
        with self._lock:
            while self._unread and len(texts) < MOST_READ:
                key, _ = self._unread.popitem()
                texts[key] = self._tail_before(key) + self._chunks[key][0]
        for key, tokens in texts.items():
            names = anchors.find(self._text_of_tokens(tokens)).tobytes()
            with self._lock:
                if key in self._chunks:
                    self._names[key] = names

    def _tail_before(self, key: bytes) -> bytes:
        """The last tokens before a chunk, as far as they are held."""
        tail, before = b"", self._chunks[key][1]
        while before is not None and before in self._chunks and len(tail) < TAIL_BYTES:
            tokens, parent = self._chunks[before]
            tail, before = tokens + tail, parent
        return tail[-TAIL_BYTES:]
