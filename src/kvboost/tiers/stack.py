"""The tier stack: memory, and slower tiers below it that are read on a miss and written later."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvboost.codecs.frame import check
from kvboost.core import FrameKey
from kvboost.errors import CacheError, KVBoostError
from kvboost.metrics import Metrics
from kvboost.tiers.base import Medium, StoredChunk, Tier
from kvboost.tiers.epochs import Erasure
from kvboost.tiers.guarded import Check, GuardedTier, Patience

if TYPE_CHECKING:
    from kvboost.tiers.memory import MemoryTier

log = logging.getLogger(__name__)

MOST_NOTES = 1 << 16  # that wait to be written
LEAST_WAIT_S = 0.1  # threads of a busy machine may be that late
WAITED_SHARE = 0.25  # of the time that computing takes, for a tier that works but is busy
ANY_RATE = 1e-9
LOADED_TOGETHER = 16  # chunks that are on their way to a device at once: they take pinned memory
USUAL_BYTES_PER_S = 100e6  # at least, of a tier that is worth waiting for, before a model was timed


@dataclass(frozen=True, slots=True)
class Opener:
    """How a tier is opened, and how long an engine that starts waits for it."""

    name: str
    make: Callable[[], Tier]
    patience_s: float = 5.0


class TierStack:
    """The tiers of an engine. Thread-safe; nothing here raises because of a tier.

    A chunk stays in memory until it is written below, so that what waits to be written is within
    memory's budget.
    """

    def __init__(
        self, memory: MemoryTier, medium: Medium, metrics: Metrics, deadline_s: float
    ) -> None:
        """`medium` makes the chunks of memory.

        `deadline_s` is how long a tier below may be silent.
        """
        self.memory, self.medium = memory, medium
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._below: list[GuardedTier] = []
        self._lock = threading.Lock()
        self._notes: dict[FrameKey, memoryview] = {}
        self._gone: list[FrameKey] = []
        self._erasing = threading.Lock()
        # For each tier that is being loaded from: what it may still deliver although deleted.
        self._not_to_load: dict[GuardedTier, list[Erasure]] = {}

    def add_below(self, opener: Opener, opened: Callable[[Tier], Iterator[None]]) -> None:
        """Add a tier at the bottom, and wait a while until its contents are indexed.

        `opened` learns that step by step. What is not known yet is a miss.

        Raises:
            ConfigError: it can never be opened.
        """
        guarded = GuardedTier(
            opener.name, opener.make, self, self._metrics, opened, self._deadline_s
        )
        self._below.append(guarded)
        guarded.wait_until_tried(opener.patience_s)

    @property
    def is_deep(self) -> bool:
        """Whether there is anything below memory."""
        return bool(self._below)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may have stored chunks this process has not seen."""
        return any(not guarded.is_own for guarded in self._below)

    def patience(self, num_bytes: int = 0, compute_s: float | None = None) -> Patience:
        """The patience of a request that starts now.

        `compute_s` is how long the model would take to compute `num_bytes` of K/V, if known.
        """
        each_s, num_below = self._deadline_s, len(self._below)
        if compute_s is None:
            return Patience(each_s, each_s * num_below, USUAL_BYTES_PER_S)
        worth_s = max(compute_s, LEAST_WAIT_S)
        each_s = min(each_s, worth_s)
        deadline_s = max(each_s * num_below, WAITED_SHARE * compute_s)
        predicted = num_bytes / max(compute_s, 1e-6)
        return Patience(each_s, deadline_s, num_bytes / worth_s, predicted)

    def get(
        self,
        keys: Sequence[FrameKey],
        patience: Patience | None = None,
        held: list[FrameKey] | None = None,
    ) -> dict[FrameKey, StoredChunk]:
        """Chunks that are in memory, or that a tier of our own delivers in time.

        Without `patience` they are waited for as long as they come. Adds to `held` the keys that
        are held in memory until the caller releases them: no more than memory allows.
        """
        each = patience or Patience(self._deadline_s, self._deadline_s, ANY_RATE)
        found = self.memory.get(keys)
        most_bytes = math.inf
        if held is not None:
            held += filter(self.memory.hold, found)
            most_bytes = self.memory.stats().budget_bytes // 2
        for guarded in self._below:
            wanted = [key for key in keys if key not in found and guarded.holds(key)]
            found |= self._load(guarded, wanted, each, most_bytes, held=held)
        return found

    def load(
        self, keys: Sequence[FrameKey], patience: Patience, *, in_order: bool = False
    ) -> dict[FrameKey, StoredChunk]:
        """Bring chunks from shared tiers into memory, at most half of its budget.

        `in_order` says that a key is of no use unless all keys before it were found.
        """
        found: dict[FrameKey, StoredChunk] = {}
        most_bytes = self.memory.stats().budget_bytes // 2
        for guarded in self._below:
            if not guarded.is_own:
                wanted = [key for key in keys if not self.memory.holds(key)]
                found |= self._load(guarded, wanted, patience, most_bytes, in_order=in_order)
        return found

    def make_room(self, num_bytes: int) -> bool:
        """Evict chunks from memory that nobody uses; whether there were any."""
        gone = self.memory.evict(num_bytes)
        self._note_gone(gone)
        return bool(gone)

    def put(self, key: FrameKey, chunk: StoredChunk, *, is_wanted: bool = False) -> bool:
        """Keep a chunk in memory; whether there was room for it.

        With `is_wanted`, it replaces chunks of a higher rank. So does everything new where tiers
        below work: it is on its way down.
        """
        is_passed_on = any(guarded.tier is not None for guarded in self._below)
        keep = self.memory.admit if is_wanted or is_passed_on else self.memory.put
        gone = keep({key: chunk})
        self._note_gone(each for each in gone if each != key)
        return key not in gone

    def send_below(self, keys: Iterable[FrameKey]) -> None:
        """Queue chunks in memory for writing below, in the given order."""
        for key in keys:
            for guarded in self._below:
                if self.memory.hold(key):
                    guarded.behind.put(key)
                else:
                    guarded.behind.drop(1)

    def get_notes(
        self, keys: Sequence[FrameKey], check_note: Check, patience: Patience
    ) -> Mapping[FrameKey, memoryview]:
        """The notes under keys in the shared tier."""
        shared = self._shared()
        return {} if shared is None else shared.get_notes(keys, patience, check_note)

    def put_notes(self, notes: Mapping[FrameKey, memoryview]) -> None:
        """Write small values to the shared tier, for other processes to read."""
        shared = self._shared()
        with self._lock:
            if shared is None or len(self._notes) + len(notes) > MOST_NOTES:
                return
            new = [key for key in notes if key not in self._notes]  # others wait already
            self._notes.update(notes)
        for key in new:
            shared.behind.put(key, is_chunk=False)

    def pin(self, keys: Sequence[FrameKey], ttl_s: float | None) -> list[FrameKey]:
        """Load keys into memory and pin them, for `ttl_s` seconds or for good.

        Returns those that are pinned.
        """
        self.get(keys)
        return self.memory.pin(keys, ttl_s)

    def discard(self, key: FrameKey) -> bool:
        """Forget `key` everywhere unless it is pinned; returns whether it will be gone."""
        self.memory.discard([key])
        if self.memory.holds(key):
            return False
        for guarded in self._below:
            guarded.behind.discard(key)
        return True

    def erase(self, erasure: Erasure, *, is_told: bool = False) -> None:
        """Erase frames from memory now, and from the tiers below soon.

        `is_told` says that another process has them erased from the shared tiers, but for those
        that this one has stored since.
        """
        with self._erasing:
            for erasures in self._not_to_load.values():
                erasures.append(erasure)
            for guarded in self._below:
                is_whole = not (is_told and guarded.is_shared)
                guarded.behind.erase(erasure if is_whole else Erasure(erasure.keys))
            self.memory.erase(erasure.keys)

    def epoch(self, key: FrameKey, patience: Patience) -> int | None:
        """The epoch in the shared tier; None if that does not answer."""
        shared = self._shared()
        return None if shared is None else shared.epoch(key, patience)

    def raise_epoch(self, key: FrameKey, epoch: int) -> None:
        """Restore an epoch that shared tiers have lost."""
        for guarded in self._below:
            if not guarded.is_own:
                guarded.behind.erase(Erasure(epoch=(key, epoch)))

    def not_erased(self, timeout_s: float) -> list[str]:
        """The tiers with something left to erase after this time."""
        until = time.monotonic() + timeout_s
        return [
            guarded.name
            for guarded in self._below
            if not guarded.behind.wait_until_erased(max(0.0, until - time.monotonic()))
        ]

    def holds(self, key: FrameKey) -> bool:
        """Whether `key` is known to be in a tier, which may be down now."""
        return self.memory.holds(key) or any(guarded.holds(key) for guarded in self._below)

    def has_at_hand(self, key: FrameKey) -> bool:
        """Whether `key` is in memory, or known to be in a tier that works."""
        return self.memory.holds(key) or any(
            guarded.tier is not None and guarded.holds(key) for guarded in self._below
        )

    def take_gone(self) -> list[FrameKey]:
        """The keys that left a tier since the last call."""
        with self._lock:
            gone, self._gone = self._gone, []
        return gone

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written below or abandoned; returns whether that is the case."""
        waits = [guarded.behind.flush(timeout_s) for guarded in self._below]
        return all(waits)

    def stats(self) -> dict[str, dict[str, int | bool]]:
        """Sizes and counts of the tiers below memory, by name."""
        return {guarded.name: guarded.stats() for guarded in self._below}

    def close(self) -> None:
        """Finish writing and close all tiers."""
        for guarded in self._below:
            guarded.close()

    def _load(
        self,
        guarded: GuardedTier,
        keys: Sequence[FrameKey],
        patience: Patience,
        most_bytes: float,
        *,
        in_order: bool = False,
        held: list[FrameKey] | None = None,
    ) -> dict[FrameKey, StoredChunk]:
        """Copy frames of a tier into memory, about `most_bytes` of them."""
        loaded: dict[FrameKey, StoredChunk] = {}
        # Frames of our own tiers are mapped, others are in memory until they are copied.
        for batch in [keys] if guarded.is_own and keys else guarded.batches(keys):
            found = self._load_batch(guarded, batch, patience, held)
            loaded |= found
            most_bytes -= sum(chunk.nbytes for chunk in found.values())
            if most_bytes <= 0 or patience.is_over or guarded.tier is None:
                break
            if in_order and len(found) < len(batch):
                break
        return loaded

    def _load_batch(
        self,
        guarded: GuardedTier,
        keys: Sequence[FrameKey],
        patience: Patience,
        held: list[FrameKey] | None,
    ) -> dict[FrameKey, StoredChunk]:
        """One batch of a tier at a time: its frames are beyond the budget until they are copied."""
        if not guarded.loading.acquire(timeout=min(patience.left_s, threading.TIMEOUT_MAX)):
            return {}
        with self._erasing:
            erasures = self._not_to_load[guarded] = guarded.behind.pending()
        try:
            frames = guarded.get(keys, patience, check)
            guarded.count(len(keys), len(frames))
            chunks: dict[FrameKey, StoredChunk] = {}
            copied = self._copied(guarded, frames)
            while frames:
                with self.medium.loading():
                    chunks |= islice(copied, LOADED_TOGETHER)
            self._metrics.add("loaded_chunks", len(chunks))
            with self._erasing:
                for erasure in erasures:
                    chunks = {k: c for k, c in chunks.items() if not erasure.covers(c.entry)}
                # The last one first, so that it is the first to leave.
                for key, chunk in reversed(chunks.items()):
                    self._note_gone(self.memory.admit({key: chunk}))
                    if held is not None and self.memory.hold(key):
                        held.append(key)
            return chunks
        finally:
            with self._erasing:
                del self._not_to_load[guarded]
            guarded.loading.release()

    def _copied(
        self, guarded: GuardedTier, frames: dict[FrameKey, memoryview]
    ) -> Iterator[tuple[FrameKey, StoredChunk]]:
        """Chunks of frames, which it takes out, as long as there is room."""
        for key in list(frames):
            frame = frames.pop(key)
            try:
                chunk = self.medium.from_frame(frame)
            except CacheError as error:
                log.warning("a stored frame cannot be used: %s", error)
                self._metrics.add("damaged_frames")
                guarded.behind.discard(key)
            except KVBoostError as error:
                log.debug("no room for stored chunks: %s", error)
                frames.clear()
                break
            else:
                yield key, chunk

    # What the writing threads ask for (`behind.Source`).

    def take(self, key: FrameKey) -> memoryview | None:
        """A frame to write; None if it was discarded meanwhile."""
        if key in self._notes:
            return self._notes[key]
        chunk = self.memory.peek(key)
        return None if chunk is None else chunk.frame()

    def written(self, key: FrameKey) -> None:
        """A key was written, or its write was abandoned."""
        with self._lock:
            is_note = self._notes.pop(key, None) is not None
        if not is_note:
            self.memory.release(key)

    def left(self, keys: Sequence[FrameKey]) -> None:
        """Keys were evicted from a tier."""
        self._note_gone(keys)

    def _shared(self) -> GuardedTier | None:
        """The first shared tier, if it works."""
        working = (each for each in self._below if each.tier is not None and not each.is_own)
        return next(working, None)

    def _note_gone(self, keys: Iterable[FrameKey]) -> None:
        with self._lock:
            self._gone += keys
