"""Write-behind: a thread that writes chunks from memory to a tier below it."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvboost.core import FrameKey
from kvboost.errors import TierUnavailable
from kvboost.metrics import Metrics
from kvboost.tiers.base import Tier
from kvboost.tiers.epochs import Erasure

BATCH_BYTES, BATCH_KEYS = 8 << 20, 256  # that are written at once, at most
NICENESS = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0  # before a tier that failed is tried again

log = logging.getLogger(__name__)


def give_way(niceness: int) -> None:
    """Let other threads go first, and use one core at a time, but any that the process uses.

    vLLM binds the thread of its model to a core, which the threads that it makes inherit: what runs
    there delays each step. Without a limit to one core, OpenMP would bind a thread again when it
    first shares out its work. Only on Linux does a thread have a niceness of its own.
    """
    if sys.platform != "linux":
        return
    if (limit := getattr(ctypes.CDLL(None), "omp_set_num_threads", None)) is not None:
        limit(1)  # in this thread
    with suppress(OSError):  # a sandbox may forbid it
        os.nice(niceness)
    with suppress(OSError):
        threads = map(int, os.listdir("/proc/self/task"))
        os.sched_setaffinity(0, set().union(*map(_cores, threads)))


def _cores(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has ended
        return set()


class Source(Protocol):
    """Supplies the writing thread, and is told what it has done."""

    def take(self, key: FrameKey) -> memoryview | None:
        """The frame to write; None if it is no longer wanted."""

    def written(self, key: FrameKey) -> None:
        """A key was written, or its write was abandoned."""

    def left(self, keys: Sequence[FrameKey]) -> None:
        """Keys were evicted from the tier."""


@dataclass(frozen=True)
class _Job:
    key: FrameKey
    is_discard: bool
    is_chunk: bool  # rather than a note; notes are not counted


class WriteBehind:
    """Writes and discards frames in order; a fault drops the job.

    Erasures keep this order, and are retried until they are done.
    """

    def __init__(
        self,
        name: str,
        tier: Callable[[], Tier | None],
        source: Source,
        failed: Callable[[Exception], None],
        done: Callable[[Sequence[FrameKey]], None],
        metrics: Metrics,
    ) -> None:
        """`tier` returns the tier to write to, or None while it is down.

        `failed` is told of faults, `done` of keys that were written, discarded or given up.
        """
        self._name = name
        self._tier = tier
        self._source = source
        self._failed = failed
        self._done = done
        self._metrics = metrics
        self._jobs: deque[_Job | Erasure] = deque()
        self._owed: list[Erasure] = []  # that could not be done yet
        self._num_erasures = 0  # owed, or among the jobs
        self._raised: set[Erasure] = set()  # owed ones whose epoch the tier has
        self._erase_at, self._erase_pause_s = 0.0, FIRST_PAUSE_S
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closed = False
        self._pause_s = FIRST_PAUSE_S
        self._again_at = 0.0
        self.num_written = 0
        self.num_dropped = 0
        self._thread = threading.Thread(
            target=self._loop, name=f"kvboost-{name}-behind", daemon=True
        )
        self._thread.start()

    def put(self, key: FrameKey, *, is_chunk: bool = True) -> None:
        """Write what the source has under `key`; only chunks are counted."""
        self._add(_Job(key, is_discard=False, is_chunk=is_chunk))

    def drop(self, num_chunks: int) -> None:
        """Count chunks as dropped: they will not be written."""
        self.num_dropped += num_chunks
        self._metrics.add("dropped_writes", num_chunks)

    def discard(self, key: FrameKey) -> None:
        """Forget `key` below."""
        self._add(_Job(key, is_discard=True, is_chunk=False))

    def erase(self, erasure: Erasure) -> None:
        """Erase frames below, with as many retries as that takes."""
        with self._changed:
            self._num_erasures += 1
        self._add(erasure)

    def pending(self) -> list[Erasure]:
        """What is still to be erased."""
        with self._changed:
            if not self._num_erasures:  # as nearly always; many writes may wait
                return []
            return [*self._owed, *(job for job in self._jobs if isinstance(job, Erasure))]

    def wait_until_erased(self, timeout_s: float) -> bool:
        """Wait until nothing is left to erase; returns whether that is the case."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_erasures, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; returns whether that is the case."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish all jobs; returns whether that took less than `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _add(self, job: _Job | Erasure) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _loop(self) -> None:
        give_way(NICENESS)
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                pause_s = self._erase_pause_s if self._owed else None
                self._changed.wait_for(lambda: self._jobs or self._is_closed, pause_s)
                is_over = self._is_closed and not self._jobs
                self._is_busy = bool(self._jobs)
                if self._jobs and isinstance(self._jobs[0], Erasure):
                    self._owed.append(self._jobs[0])
                    self._jobs.popleft()
                    self._erase_at = 0.0
            if is_over or time.monotonic() >= self._erase_at:
                self._erase()
            if is_over:
                return
            if self._jobs and not isinstance(self._jobs[0], Erasure):
                self._next_batch()

    def _erase(self) -> None:
        """Do the pending erasures, if the tier works."""
        tier = self._tier()
        for erasure in list(self._owed) if tier is not None else ():
            assert tier is not None
            try:
                if erasure.epoch is not None and erasure not in self._raised:
                    before = tier.raise_epoch(*erasure.epoch)
                    self._raised.add(erasure)
                    if before >= erasure.epoch[1]:
                        erasure.outdated(before)
                tier.erase(erasure.keys, erasure.owners)
            except Exception as error:
                log.info("cache tier %s: deletion is pending: %s", self._name, error)
                self._erase_at = time.monotonic() + self._erase_pause_s
                self._erase_pause_s = min(2 * self._erase_pause_s, LONGEST_PAUSE_S)
                return
            self._erase_pause_s = FIRST_PAUSE_S
            with self._changed:
                self._owed.remove(erasure)
                self._raised.discard(erasure)
                self._num_erasures -= 1
                self._changed.notify_all()

    def _put_off(self, error: Exception) -> None:
        """Pause writes to a tier that failed."""
        if self._pause_s == FIRST_PAUSE_S:
            is_foreseen = isinstance(error, (TierUnavailable, OSError))
            log.warning(
                "cache tier %s cannot be written: %s",
                self._name,
                error,
                exc_info=None if is_foreseen else error,
            )
        self._again_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._failed(error)

    def _next_batch(self) -> None:
        """Do jobs of one kind, as many as make a good batch."""
        is_discard, jobs, frames = self._collect()
        keys = [job.key for job in jobs]
        chunks = {job.key for job in jobs if job.is_chunk and job.key in frames}
        tier = self._tier()
        try:
            if tier is None or time.monotonic() < self._again_at:
                self.drop(len(chunks))
            elif is_discard:
                tier.discard(keys)
            elif frames:
                left = tier.put(frames)
                refused = chunks.intersection(left)
                self.num_written += len(chunks) - len(refused)
                self.drop(len(refused))
                self._pause_s = FIRST_PAUSE_S
                self._source.left(left)
        except Exception as error:
            self.drop(len(chunks))
            self._put_off(error)
        self._done(keys)
        if not is_discard:
            frames.clear()
            for key in keys:
                self._source.written(key)

    def _frame(self, job: _Job) -> memoryview | None:
        try:
            return self._source.take(job.key)
        except Exception as error:  # out of memory, on a device perhaps
            log.warning("cache tier %s: a chunk is not written: %s", self._name, error)
            self.drop(job.is_chunk)
            return None

    def _collect(self) -> tuple[bool, list[_Job], dict[FrameKey, memoryview]]:
        """Whether to discard, the jobs, and the frames of those that are to be written."""
        frames: dict[FrameKey, memoryview] = {}
        jobs: list[_Job] = []
        size_bytes, is_discard = 0, False
        while self._jobs:
            job = self._jobs[0]
            if isinstance(job, Erasure) or (jobs and job.is_discard != is_discard):
                break
            is_discard = job.is_discard
            self._jobs.popleft()
            jobs.append(job)
            frame = None if is_discard else self._frame(job)
            if frame is not None:
                frames[job.key] = frame
                size_bytes += frame.nbytes
            if size_bytes >= BATCH_BYTES or len(jobs) == BATCH_KEYS:
                break
        return is_discard, jobs, frames
