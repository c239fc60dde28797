"""Host memory: frames in a dict, within a budget of bytes and entries."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from kvboost.core import FrameKey
from kvboost.tiers.base import Tier, TierStats
from kvboost.tiers.eviction import SegmentedLRU


class MemoryTier(Tier):
    """The hot tier of one process."""

    def __init__(
        self,
        budget_bytes: int,
        max_entries: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._max_entries = math.inf if max_entries is None else max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._frames: dict[FrameKey, memoryview] = {}
        self._size_bytes = 0
        self._eviction = SegmentedLRU(budget_bytes)
        self._pinned_until: dict[FrameKey, float] = {}

    def get(self, key: FrameKey) -> memoryview | None:
        """The frame itself, not a copy."""
        with self._lock:
            frame = self._frames.get(key)
            if frame is not None:
                self._eviction.use(key)
            return frame

    def put(self, key: FrameKey, frame: memoryview) -> list[FrameKey]:
        """Evict until the frame fits; refuse it if pinned entries leave no room."""
        with self._lock:
            self._drop(key)
            evicted = self._victims_for(frame.nbytes)
            if evicted is None:
                return [key]
            for victim in evicted:
                self._drop(victim)
            self._frames[key] = frame
            self._size_bytes += frame.nbytes
            self._eviction.add(key, frame.nbytes)
            return evicted

    def discard(self, key: FrameKey) -> bool:
        """Forget `key` unless it is pinned; whether it is gone now."""
        with self._lock:
            if self._is_pinned(key, self._clock()):
                return False
            self._drop(key)
            return True

    def pin(self, keys: Iterable[FrameKey], ttl_s: float | None) -> int:
        """Pins end by themselves after `ttl_s`."""
        until = math.inf if ttl_s is None else self._clock() + ttl_s
        with self._lock:
            held = [key for key in keys if key in self._frames]
            for key in held:
                self._pinned_until[key] = max(until, self._pinned_until.get(key, until))
            return len(held)

    def stats(self) -> TierStats:
        """Sizes now; pins that have run out do not count."""
        with self._lock:
            now = self._clock()
            num_pinned = sum(until > now for until in self._pinned_until.values())
            return TierStats(len(self._frames), self._size_bytes, self._budget_bytes, num_pinned)

    def _drop(self, key: FrameKey) -> None:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self._size_bytes -= frame.nbytes
            self._eviction.remove(key)
            self._pinned_until.pop(key, None)

    def _is_pinned(self, key: FrameKey, now: float) -> bool:
        return self._pinned_until.get(key, -math.inf) > now

    def _victims_for(self, incoming_bytes: int) -> list[FrameKey] | None:
        """Which keys must leave before `incoming_bytes` fit; None if they never do."""
        now = self._clock()
        excess_bytes = self._size_bytes + incoming_bytes - self._budget_bytes
        excess_entries = len(self._frames) + 1 - self._max_entries
        chosen: list[FrameKey] = []
        for key in self._eviction.victims():
            if excess_bytes <= 0 and excess_entries <= 0:
                break
            if self._is_pinned(key, now):
                continue
            chosen.append(key)
            excess_bytes -= self._frames[key].nbytes
            excess_entries -= 1
        return chosen if excess_bytes <= 0 and excess_entries <= 0 else None
