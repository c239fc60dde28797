"""A tier that cannot hurt: a deadline, a circuit breaker, and a check of all that it returns.

Calls to the tier itself run on two threads of their own, one that reads and one that writes. A
request waits for a read no longer than its deadline. When nothing came until then, or the tier
failed, it is left alone until it has answered a probe of the reading thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvboost.codecs.frame import FrameError
from kvboost.core import FrameKey, PrefixKey
from kvboost.errors import ConfigError, TierUnavailable
from kvboost.metrics import Metrics
from kvboost.tiers.base import OwnTier, Tier, TierStats
from kvboost.tiers.behind import FIRST_PAUSE_S, LONGEST_PAUSE_S, Source, WriteBehind

CLOSING_S = 10.0  # what closing waits for writes
PROBE = PrefixKey(b"kvboost probe".ljust(32, b"."))  # nothing is ever stored under it

Check: TypeAlias = Callable[[memoryview, FrameKey], object]
"""Raises `FrameError` unless bytes are what was put under a key."""

log = logging.getLogger(__name__)


@dataclass
class _Read:
    keys: Sequence[FrameKey]
    check: Check
    found: dict[FrameKey, memoryview] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False


def _wake_up() -> None:
    """A job that lets the reading thread look around."""


class GuardedTier:
    """A tier below memory, in a box. Nothing here raises because of the tier."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tier],
        source: Source,
        metrics: Metrics,
        opened: Callable[[Tier], None],
    ) -> None:
        """`make` opens the tier and `opened` is told of it, both on the reading thread.

        A `make` that failed is called again later.
        """
        self.name = name
        self._make = make
        self._opened = opened
        self._metrics = metrics
        self._tier: Tier | None = None
        self._is_up = False
        self._is_closed = threading.Event()
        self._was_tried = threading.Event()
        self._refusal: ConfigError | None = None
        self._num_hits = self._num_misses = self._num_faults = self._num_reads = 0
        self._condemned: set[FrameKey] = set()  # damaged; their discard is on its way
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

    def holds(self, key: FrameKey) -> bool:
        """Whether `key` is here for sure, though perhaps not to be had now."""
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
        self, keys: Sequence[FrameKey], until: float, check: Check
    ) -> dict[FrameKey, memoryview]:
        """What the tier has of `keys`, if it answers until `until`, by `time.monotonic`."""
        if not keys or not self._is_up:
            return {}
        read, num_before = _Read(keys, check), self._num_reads
        self._jobs.put(partial(self._carry_out, read))
        is_done = read.done.wait(max(0.0, until - time.monotonic()))
        read.is_abandoned = True
        if is_done and self._is_up:
            self._pause_s = FIRST_PAUSE_S
        elif not is_done and self._num_reads == num_before:  # else it is only busy with others
            self._fail(TierUnavailable("no answer in time"))
        return read.found if is_done else {}

    def count(self, num_asked: int, num_found: int) -> None:
        """Count chunks that were asked for."""
        self._num_hits += num_found
        self._num_misses += num_asked - num_found

    def hint(self, keys: Sequence[FrameKey]) -> None:
        """Say which keys will be asked for soon."""
        tier = self.tier  # once: another thread may take it down meanwhile
        if isinstance(tier, OwnTier):
            self._jobs.put(partial(tier.hint, keys))

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
        """Finish writing, within limits, and let the tier go."""
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
            log.warning("cache tier %s failed, going on without it: %s", self.name, error)
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
        try:
            job()
        except Exception as error:
            self._fail(error)

    def _revive(self) -> None:
        """Try whether the tier works, opening it if need be; no request waits for this."""
        self._retry_at = time.monotonic() + self._pause_s
        try:
            if self._tier is None:
                self._tier = self._open()
            self._tier.get([PROBE])
            self._is_up = True
            level = logging.WARNING if self._num_faults else logging.INFO
            log.log(level, "cache tier %s works", self.name)
        except ConfigError as error:
            self._refusal = error
            self._is_closed.set()
        except Exception as error:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._note(error)
        self._was_tried.set()

    def _open(self) -> Tier:
        tier = self._make()
        try:
            self._opened(tier)
        except BaseException:
            tier.close()
            raise
        return tier

    def _carry_out(self, read: _Read) -> None:
        if read.is_abandoned or self._tier is None:
            return
        try:
            frames = self._tier.get(read.keys).items()
            read.found = {k: frame for k, frame in frames if self._is_sound(frame, k, read.check)}
            self._num_reads += 1
        except Exception as error:
            self._fail(error)
        read.done.set()

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
