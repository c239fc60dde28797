"""The memory tier: chunks in a dict, within a budget of bytes and entries."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvboost.codecs.frame import OWNER_BYTES
from kvboost.core import FrameKey, Owner
from kvboost.tiers.base import StoredChunk, TierStats
from kvboost.tiers.eviction import ReuseDensity

MUCH_PINNED = 0.5  # of the budget
MOST_OF_FREE = 3  # times the free bytes: the most that one of several tenants may hold

log = logging.getLogger(__name__)


@dataclass
class _Hold:
    size_bytes: int
    owner: Owner
    count: int = 0


class MemoryTier:
    """The hot tier of one process. Thread-safe."""

    def __init__(
        self,
        budget_bytes: int,
        max_entries: int | None = None,
        quota_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`quota_bytes` is what one tenant may hold of the budget."""
        self._budget_bytes = budget_bytes
        self._max_entries = math.inf if max_entries is None else max_entries
        self._quota_bytes = budget_bytes if quota_bytes is None else quota_bytes
        self._has_quotas = self._quota_bytes < budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._chunks: dict[FrameKey, StoredChunk] = {}
        self._size_bytes = 0
        self._held_bytes: Counter[Owner] = Counter()
        self._eviction = ReuseDensity(budget_bytes)
        self._pinned_until: dict[FrameKey, float] = {}
        self._ends_of_pins: list[tuple[float, FrameKey]] = []  # a heap; pins may last longer
        self._holds: dict[FrameKey, _Hold] = {}
        self._on_hold_bytes = 0
        self._on_hold_of: Counter[Owner] = Counter()

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, StoredChunk]:
        """The chunks of those `keys` that are here.

        Counts as a use of each. The first counts as used last: a prompt is useless without its
        beginning.
        """
        with self._lock:
            found = {key: self._chunks[key] for key in keys if key in self._chunks}
            self._eviction.use(reversed(found))
            return found

    def put(self, chunks: Mapping[FrameKey, StoredChunk]) -> list[FrameKey]:
        """Store chunks, evicting the least valuable ones until all fits; that may be a new one.

        Returns the keys that were evicted. The budget holds at every moment.
        """
        with self._lock:
            return [gone for item in chunks.items() for gone in self._put(*item, is_wanted=False)]

    def admit(self, chunks: Mapping[FrameKey, StoredChunk]) -> list[FrameKey]:
        """Like `put`, for chunks about to be read: admitted whatever their rank."""
        with self._lock:
            return [gone for item in chunks.items() for gone in self._put(*item, is_wanted=True)]

    def evict(self, num_bytes: int) -> list[FrameKey]:
        """Evict unused chunks of about `num_bytes`, as far as there are any."""
        with self._lock:
            now = self._clock()
            self._end_pins(now)
            chosen = []
            for key in self._eviction.victims():
                if num_bytes <= 0:
                    break
                chunk = self._chunks[key]
                if key not in self._holds and not self._is_pinned(key, now) and not chunk.is_in_use:
                    chosen.append(key)
                    num_bytes -= chunk.nbytes
            for key in chosen:
                self._drop(key)
            return chosen

    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Forget keys, unless they are pinned."""
        with self._lock:
            now = self._clock()
            for key in keys:
                if not self._is_pinned(key, now):
                    self._drop(key)

    def holds(self, key: FrameKey) -> bool:
        """Whether `key` is here; does not count as a use."""
        return key in self._chunks

    def peek(self, key: FrameKey) -> StoredChunk | None:
        """The chunk of `key`; does not count as a use."""
        return self._chunks.get(key)

    def hold(self, key: FrameKey) -> bool:
        """Keep `key` from being evicted until it is released, once for every hold.

        Half of the budget at most: otherwise False, and nothing is held. Of several tenants,
        each may hold at most a multiple of what is still free, so none takes all of it.
        """
        with self._lock:
            if key not in self._holds:
                chunk = self._chunks.get(key)
                if chunk is None:
                    return False
                owner, is_shared = _owner_of(chunk), len(self._held_bytes) > 1
                free_bytes = self._budget_bytes // 2 - self._on_hold_bytes - chunk.nbytes
                own_bytes = self._on_hold_of[owner] + chunk.nbytes
                if free_bytes < 0 or (is_shared and own_bytes > MOST_OF_FREE * free_bytes):
                    return False
                self._on_hold_bytes += chunk.nbytes
                self._on_hold_of[owner] += chunk.nbytes
                self._holds[key] = _Hold(chunk.nbytes, owner)
            self._holds[key].count += 1
            return True

    def release(self, key: FrameKey) -> None:
        """End a hold."""
        with self._lock:
            hold = self._holds[key]
            hold.count -= 1
            if not hold.count:
                self._on_hold_bytes -= hold.size_bytes
                self._on_hold_of[hold.owner] -= hold.size_bytes
                if not self._on_hold_of[hold.owner]:
                    del self._on_hold_of[hold.owner]
                del self._holds[key]
                self._let_go(key)

    @contextmanager
    def holding(self, keys: Iterable[FrameKey]) -> Iterator[None]:
        """Hold those of `keys` that are here now for as long as the block runs."""
        held = [key for key in keys if self.hold(key)]
        try:
            yield
        finally:
            for key in held:
                self.release(key)

    def pin(self, keys: Iterable[FrameKey], ttl_s: float | None) -> list[FrameKey]:
        """Pin those of `keys` that are here, for `ttl_s` seconds or for good.

        Returns those that are pinned. Pins end by themselves.
        """
        until = math.inf if ttl_s is None else self._clock() + ttl_s
        with self._lock:
            held = [key for key in keys if key in self._chunks]
            for key in held:
                self._pinned_until[key] = max(until, self._pinned_until.get(key, until))
                self._eviction.set_aside(key)
                if until < math.inf:
                    heapq.heappush(self._ends_of_pins, (until, key))
            now = self._clock()
            pinned = (key for key in self._pinned_until if self._is_pinned(key, now))
            num_bytes = sum(self._chunks[key].nbytes for key in pinned)
        if num_bytes > MUCH_PINNED * self._budget_bytes:
            share = num_bytes / self._budget_bytes
            log.warning("pins take %.0f%% of the memory for K/V; little else stays", 100 * share)
        return held

    def erase(self, keys: Iterable[FrameKey]) -> None:
        """Forget keys, pinned or not."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def stats(self) -> TierStats:
        """Sizes now."""
        with self._lock:
            return TierStats(len(self._chunks), self._size_bytes, self._budget_bytes)

    def held_bytes(self, owner: Owner) -> int:
        """What one tenant holds of the budget."""
        return self._held_bytes.get(owner, 0)

    def pinned(self) -> list[StoredChunk]:
        """Chunks that cannot be evicted now: pinned or held."""
        with self._lock:
            now = self._clock()
            keys = {key for key, until in self._pinned_until.items() if until > now}
            return [self._chunks[key] for key in keys | self._holds.keys() if key in self._chunks]

    @property
    def num_pinned(self) -> int:
        """How many chunks are pinned."""
        with self._lock:
            now = self._clock()
            return sum(until > now for until in self._pinned_until.values())

    def _put(self, key: FrameKey, chunk: StoredChunk, *, is_wanted: bool) -> list[FrameKey]:
        pinned_until = self._pinned_until.get(key)
        self._drop(key)
        if chunk.nbytes > min(self._budget_bytes, self._quota_bytes):
            return [key]
        owner = _owner_of(chunk)
        self._chunks[key] = chunk
        self._size_bytes += chunk.nbytes
        self._held_bytes[owner] += chunk.nbytes
        if pinned_until is not None:
            self._pinned_until[key] = pinned_until
        self._eviction.add({key: chunk.nbytes}, owner if self._has_quotas else None)
        victims = self._victims(owner, spared=key if is_wanted else None)
        if victims is None or key in victims:
            victims = [key]
        for victim in victims:
            self._drop(victim)
        return list(victims)

    def _drop(self, key: FrameKey) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._size_bytes -= chunk.nbytes
            owner = _owner_of(chunk)
            self._held_bytes[owner] -= chunk.nbytes
            if not self._held_bytes[owner]:
                del self._held_bytes[owner]
            self._eviction.remove(key)
            self._pinned_until.pop(key, None)

    def _is_pinned(self, key: FrameKey, now: float) -> bool:
        return self._pinned_until.get(key, -math.inf) > now

    def _let_go(self, key: FrameKey) -> None:
        """Allow eviction again, if no hold or pin is left."""
        if key not in self._holds and not self._is_pinned(key, self._clock()):
            self._eviction.put_back(key)

    def _end_pins(self, now: float) -> None:
        while self._ends_of_pins and self._ends_of_pins[0][0] <= now:
            self._let_go(heapq.heappop(self._ends_of_pins)[1])

    def _victims(self, owner: Owner, spared: FrameKey | None) -> Collection[FrameKey] | None:
        """The keys to evict so that all limits hold again; None if that is not enough."""
        now = self._clock()
        self._end_pins(now)
        chosen: dict[FrameKey, None] = {}
        kept: set[FrameKey] = set()

        def choose(order: Iterator[FrameKey], num_bytes: float, num_entries: float) -> bool:
            while num_bytes > 0 or num_entries > 0:
                key = next(order, None)
                if key is None:
                    return False
                if key in self._holds or self._is_pinned(key, now):
                    kept.add(key)
                elif key != spared and key not in chosen:
                    chosen[key] = None
                    num_bytes -= self._chunks[key].nbytes
                    num_entries -= 1
            return True

        # A tenant above its quota makes room from its own chunks.
        own_excess = self._held_bytes[owner] - self._quota_bytes if self._has_quotas else 0
        is_enough = choose(self._eviction.victims(owner), own_excess, 0)
        excess = self._size_bytes - self._budget_bytes - sum(self._chunks[k].nbytes for k in chosen)
        excess_entries = len(self._chunks) - self._max_entries - len(chosen)
        is_enough = is_enough and choose(self._eviction.victims(), excess, excess_entries)
        for key in kept:  # so that no later call looks at them again
            self._eviction.set_aside(key)
        return chosen if is_enough else None


def _owner_of(chunk: StoredChunk) -> Owner:
    return Owner(chunk.entry.space[:OWNER_BYTES])
