"""A tier behind a deadline, a circuit breaker and a check of every frame: faults are misses.

Calls to the tier itself run on two threads of their own, one that reads and one that writes. A
request waits for a read as long as its patience lasts, and takes what has come by then. When the
tier fails, or delivers nothing at all for a deadline, it is left alone until it has answered a
probe of the reading thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvboost.codecs.frame import FrameError
from kvboost.core import FrameKey, PrefixKey
from kvboost.errors import ConfigError, TierUnavailable
from kvboost.metrics import Metrics
from kvboost.tiers.base import OwnTier, Tier, TierStats
from kvboost.tiers.behind import FIRST_PAUSE_S, LONGEST_PAUSE_S, Source, WriteBehind
from kvboost.tiers.notes import check_epoch

CLOSING_S = 10.0  # that closing waits for writes
BATCH_BYTES = 8 << 20  # of frames that a tier is asked for at once
NOTES_AT_ONCE = 512
LEAST_TIMED_S, LEAST_TIMED_BYTES = 0.01, 1 << 20  # a batch with less says nothing of the rate
RECENT = 0.25  # weight of a batch against those before it
RATE_PROBE_S = 10.0  # before a tier that is slower than the model is tried with a batch again
EMPTY_PROBE_S = 1.0  # the same if the tier had nothing of the last batch: that tells no rate
SILENT = 0.9  # of the deadline: a request's clock starts a little before that of its read
PROBE = PrefixKey(b"kvboost probe".ljust(32, b"."))  # nothing is ever stored under it

Check: TypeAlias = Callable[[memoryview, FrameKey], object]
"""Raises `FrameError` unless bytes are what was put under a key."""

log = logging.getLogger(__name__)


@dataclass
class Patience:
    """How long a request waits for the tiers below memory, however often it asks them.

    A deadline, and longer for as long as they deliver faster than the model would compute.
    """

    each_s: float  # for the first answer of a tier
    deadline_s: float  # for all tiers, before anything was delivered
    least_bytes_per_s: float  # at a lower rate computing is faster
    predicted_bytes_per_s: float = 0.0  # of the model: a tier known to be slower is not asked
    started_at: float = field(default_factory=time.monotonic)
    num_bytes: int = 0  # that were delivered so far

    @property
    def left_s(self) -> float:
        """Seconds left."""
        worth_s = self.num_bytes / self.least_bytes_per_s if self.num_bytes else 0.0
        return max(0.0, self.started_at + self.deadline_s + worth_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether a tier asked now could no longer answer in time."""
        return self.left_s < self.each_s / 2


@dataclass
class _Read:
    batches: Iterator[Sequence[FrameKey]]
    check: Check
    are_frames: bool
    is_probe: bool = False  # of the rate
    epoch_key: FrameKey | None = None
    epoch: int | None = None
    began_at: int | None = None  # bytes that the tier had read by then
    found: dict[FrameKey, memoryview] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False


def _size(frames: dict[FrameKey, memoryview]) -> int:
    return sum(frame.nbytes for frame in dict(frames).values())


def _wake_up() -> None:
    """A job that wakes the reading thread."""


class GuardedTier:
    """A tier below memory whose faults become misses: nothing here raises because of it."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tier],
        source: Source,
        metrics: Metrics,
        opened: Callable[[Tier], Iterator[None]],
        deadline_s: float,
    ) -> None:
        """`make` opens the tier and `opened` learns what it has, both on the reading thread.

        Requests are served between the steps of `opened`. A `make` that failed is called again
        later. A tier that is silent for `deadline_s` is dead.
        """
        self.name = name
        self.loading = threading.Lock()  # while its frames are copied into memory
        self._deadline_s = deadline_s
        self._make = make
        self._opened = opened
        self._metrics = metrics
        self._tier: Tier | None = None
        self._is_up = False
        self._adoption: Iterator[None] = iter(())
        self._is_adopted = False
        self._is_closed = threading.Event()
        self._was_tried = threading.Event()
        self._refusal: ConfigError | None = None
        self._num_hits = self._num_misses = self._num_faults = 0
        self._num_batches = 0  # that were read
        self._frames_at_once = 1  # learned from the batches before
        self._seconds_per_byte = 0.0  # the same; 0: not known
        self._probe_at = 0.0
        self._began_at: float | None = None  # the job that is under way
        self._heard_at, self._delivered = 0.0, (0, 0)  # when it was last seen to have progressed
        self._condemned: set[FrameKey] = set()  # damaged; they are about to be discarded
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = 0.0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._loop, name=f"kvboost-{name}", daemon=True)
        self.behind = WriteBehind(
            name, lambda: self.tier, source, self._note, self._pardon, metrics
        )
        self._reader.start()

    @property
    def tier(self) -> Tier | None:
        """The tier itself, while it works."""
        return self._tier if self._is_up else None

    @property
    def is_own(self) -> bool:
        """Whether only this process writes the tier, which then knows what it holds."""
        return isinstance(self._tier, OwnTier)

    @property
    def is_shared(self) -> bool:
        """Whether other processes use it, which is not known before it is open."""
        return self._tier is not None and not self.is_own

    def holds(self, key: FrameKey) -> bool:
        """Whether `key` is known to be here, though the tier may be down now."""
        tier = self._tier
        return isinstance(tier, OwnTier) and tier.holds(key) and key not in self._condemned

    def wait_until_tried(self, timeout_s: float) -> None:
        """Wait for the first attempt to open the tier.

        Raises:
            ConfigError: it can never be opened.
        """
        self._was_tried.wait(timeout_s)
        if self._refusal is not None:
            raise self._refusal

    def get(
        self, keys: Sequence[FrameKey], patience: Patience, check: Check
    ) -> dict[FrameKey, memoryview]:
        """The frames of `keys` that the tier delivers while patience lasts.

        Nothing if it is known to be slower than the model, but for a batch now and then.
        """
        probed: dict[FrameKey, memoryview] = {}
        if keys and self._is_slower(patience):
            if not self._is_probe_due():
                return {}
            num = self._frames_at_once
            probe = _Read(iter([keys[:num]]), check, are_frames=True, is_probe=True)
            probed, keys = self._get(probe, patience), keys[num:]
            if self._is_slower(patience):
                pause_s = RATE_PROBE_S if probed else EMPTY_PROBE_S
                self._probe_at = time.monotonic() + pause_s
                return probed
            self._probe_at = 0.0
            log.info("cache tier %s: faster than computing again", self.name)
        read = _Read(self.batches(keys), check, are_frames=True)
        return probed | self._get(read, patience) if keys else probed

    def _is_slower(self, patience: Patience) -> bool:
        return self._seconds_per_byte * patience.predicted_bytes_per_s > 1

    def _is_probe_due(self) -> bool:
        now, was_known = time.monotonic(), self._probe_at > 0
        if now < self._probe_at:
            return False
        self._probe_at = now + RATE_PROBE_S
        if not was_known:
            rate = 1e-6 / self._seconds_per_byte
            log.info("cache tier %s: %.0f MB/s, computing is faster", self.name, rate)
        return was_known

    def get_notes(
        self, keys: Sequence[FrameKey], patience: Patience, check: Check
    ) -> dict[FrameKey, memoryview]:
        """The same for notes, of which many fit into one call."""
        starts = range(0, len(keys), NOTES_AT_ONCE)
        batches = (keys[start : start + NOTES_AT_ONCE] for start in starts)
        return self._get(_Read(batches, check, are_frames=False), patience) if keys else {}

    def epoch(self, key: FrameKey, patience: Patience) -> int | None:
        """The epoch of a tenant; None if the tier does not answer."""
        read = _Read(iter(()), check_epoch, are_frames=False, epoch_key=key)
        self._get(read, patience)
        return read.epoch

    def _get(self, read: _Read, patience: Patience) -> dict[FrameKey, memoryview]:
        tier = self.tier
        if tier is None or patience.is_over:
            return {}
        num_bytes = patience.num_bytes
        self._jobs.put(partial(self._carry_out, read))
        while not read.done.wait(min(patience.left_s, self._deadline_s - self._silence_s())):
            came = 0 if read.began_at is None else tier.bytes_read - read.began_at
            came = max(came, _size(read.found))
            patience.num_bytes = num_bytes + came
            if self._silence_s() >= SILENT * self._deadline_s:
                self._fail(TierUnavailable("no answer in time"))
            if not self._is_up or not patience.left_s:
                break
        read.is_abandoned = True
        found = dict(read.found)  # the reading thread may be about to add a batch
        patience.num_bytes = num_bytes + _size(found)
        if found and self._is_up:
            self._pause_s = FIRST_PAUSE_S
        return found

    def batches(self, keys: Sequence[FrameKey]) -> Iterator[Sequence[FrameKey]]:
        """Keys in portions that are worth a call, and take a fraction of the deadline each."""
        start = 0
        while start < len(keys):
            stop = start + self._frames_at_once
            yield keys[start:stop]
            start = stop

    def count(self, num_asked: int, num_found: int) -> None:
        """Count chunks that were asked for."""
        self._num_hits += num_found
        self._num_misses += num_asked - num_found

    def stats(self) -> dict[str, int | bool]:
        """Sizes and counts at this moment."""
        sizes = TierStats(0, 0, 0) if self._tier is None else self._tier.stats()
        return {
            "is_up": self._is_up,
            "num_entries": sizes.num_entries,
            "size_bytes": sizes.size_bytes,
            "budget_bytes": sizes.budget_bytes,
            "hits": self._num_hits,
            "misses": self._num_misses,
            "written": self.behind.num_written,
            "dropped": self.behind.num_dropped,
            "faults": self._num_faults,
        }

    def close(self) -> None:
        """Finish writing, within limits, and close the tier."""
        is_written = self.behind.close(CLOSING_S)
        self._is_up = False
        self._is_closed.set()
        self._jobs.put(_wake_up)
        self._reader.join(CLOSING_S if is_written else 0.0)
        # A thread that is stuck in a call still needs the tier; both end with the process.
        if is_written and not self._reader.is_alive() and self._tier is not None:
            self._tier.close()

    def _fail(self, error: Exception) -> None:
        if self._is_up:
            self._retry_at = time.monotonic() + self._pause_s
            self._is_up = False
            is_foreseen = isinstance(error, (TierUnavailable, OSError))
            log.warning(
                "cache tier %s failed; continuing without it: %s",
                self.name,
                error,
                exc_info=None if is_foreseen else error,
            )
            # A tier that answers probes but no requests is asked less and less often.
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            # The answer may just have come: then the reading thread waits for a job by now.
            self._jobs.put(_wake_up)
        self._note(error)

    def _note(self, error: Exception) -> None:
        level = logging.DEBUG if self._was_tried.is_set() else logging.WARNING
        log.log(level, "cache tier %s does not work: %s", self.name, error)
        self._num_faults += 1
        self._metrics.add("tier_faults")

    def _loop(self) -> None:
        while not self._is_closed.is_set():
            if self._is_up:
                self._do(self._jobs.get())
            elif not self._is_closed.wait(self._retry_at - time.monotonic()):
                self._revive()

    def _do(self, job: Callable[[], None]) -> None:
        self._delivered, self._began_at = self._progress(), time.monotonic()
        try:
            job()
        except Exception as error:
            self._fail(error)
        self._began_at = None

    def _silence_s(self) -> float:
        """How long the current job has delivered nothing."""
        began_at, now, delivered = self._began_at, time.monotonic(), self._progress()
        if began_at is None:
            return 0.0
        if delivered != self._delivered:
            self._delivered, self._heard_at = delivered, now
        return now - max(began_at, self._heard_at)

    def _progress(self) -> tuple[int, int]:
        return self._num_batches, 0 if self._tier is None else self._tier.bytes_read

    def _revive(self) -> None:
        """Check whether the tier works, opening it if needed; no request waits for this."""
        self._retry_at = time.monotonic() + self._pause_s
        try:
            if self._tier is None:
                self._tier = self._make()
            self._tier.get([PROBE])
            if not self._is_adopted:
                self._adoption = self._opened(self._tier)
                self._adopt()
            self._is_up = True
            level = logging.WARNING if self._num_faults else logging.INFO
            log.log(level, "cache tier %s works", self.name)
        except ConfigError as error:
            self._refusal = error
            self._is_closed.set()
            self._was_tried.set()
        except Exception as error:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._note(error)
            self._was_tried.set()

    def _adopt(self) -> None:
        """Index some more of the tier's frames, then let reads have a turn."""
        if next(self._adoption, _wake_up) is not _wake_up:
            self._jobs.put(self._adopt)
            return
        self._is_adopted = True
        self._was_tried.set()

    def _carry_out(self, read: _Read) -> None:
        try:
            if self._tier is not None and not read.is_abandoned:
                read.began_at = self._tier.bytes_read
                if read.epoch_key is not None:
                    read.epoch = self._tier.epoch(read.epoch_key)
                    self._num_batches += 1
            for batch in read.batches:
                if read.is_abandoned or self._tier is None:
                    return
                started_at = time.monotonic()
                frames = self._tier.get(batch)
                self._num_batches += 1
                if frames and read.are_frames:
                    seconds = time.monotonic() - started_at
                    self._learn_pace(frames, seconds / len(batch))
                    self._learn_rate(_size(frames), seconds, is_probe=read.is_probe)
                for key, frame in frames.items():
                    if self._is_sound(frame, key, read.check):
                        read.found[key] = frame
        except Exception as error:
            self._fail(error)
        finally:
            read.done.set()

    def _learn_pace(self, frames: dict[FrameKey, memoryview], seconds_each: float) -> None:
        by_size = BATCH_BYTES // max(1, *(frame.nbytes for frame in frames.values()))
        by_time = self._deadline_s / 4 / max(seconds_each, 1e-6)
        self._frames_at_once = max(1, min(by_size, int(by_time), 2 * self._frames_at_once))

    def _learn_rate(self, num_bytes: int, seconds: float, *, is_probe: bool) -> None:
        is_telling = seconds >= LEAST_TIMED_S or num_bytes >= LEAST_TIMED_BYTES
        if is_probe or not self._seconds_per_byte:
            self._seconds_per_byte = seconds / num_bytes if is_telling else 0.0
        elif is_telling:
            self._seconds_per_byte += RECENT * (seconds / num_bytes - self._seconds_per_byte)

    def _pardon(self, keys: Iterable[FrameKey]) -> None:
        """Keys were discarded or written again."""
        self._condemned.difference_update(keys)

    def _is_sound(self, frame: memoryview, key: FrameKey, check: Check) -> bool:
        try:
            check(frame, key)
        except FrameError as error:
            log.warning("cache tier %s: dropped a damaged frame: %s", self.name, error)
            self._metrics.add("damaged_frames")
            self._condemned.add(key)
            self.behind.discard(key)
            return False
        return True
