"""The one thread that owns the model.

Requests from any thread queue for it. One thread also means one memory arena and one team of
compute threads, where torch would make a team of its own for every thread that calls it.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from kvboost.errors import KVBoostError

T = TypeVar("T")
Idle = Iterator[None]
"""Work for idle times, in steps: a request waits for one step at most."""
Step = Callable[[], float | None]
"""A step of steady work; in how many seconds the next one is due, None: not before a new job."""

Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], object] | None]"

QUIET_S = 0.5  # without a request, before idle work starts
OVERDUE_S = 2.0  # without an idle moment; then idle work gets a step anyway
OVERDUE_SHARE = 0.02  # of the time that such steps may take
MOST_BUSY_S = 0.005  # that jobs take before steady work has a step, though more jobs wait

log = logging.getLogger(__name__)


@dataclass
class Pulse:
    """What the thread is doing."""

    busy_since: float | None = None  # start of the current job or step; None: idle


class Worker:
    """Runs jobs in the order of arrival, and idle work in between."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        self._idle: deque[Idle] = deque()
        self._steady: list[Step] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._process_id = os.getpid()
        self._pulse = Pulse()
        # The thread knows the queues and not the worker, so that a dropped engine can end.
        self._thread = threading.Thread(
            target=_loop,
            args=(self._jobs, self._idle, self._steady, self._pulse, quiet_s),
            name="kvboost",
            daemon=True,
        )
        self._thread.start()
        self._endings: list[Callable[[], None]] = []
        self._end = weakref.finalize(self, _finish, self._jobs, self._thread, self._endings)

    def call(self, work: Callable[[], T]) -> T:
        """Do `work` on the thread and wait for it."""
        return self.start(work).result()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the thread."""
        reply: Future[T] = Future()
        self._queue(partial(_fulfil, reply, work))
        return reply

    def post(self, work: Callable[[], object]) -> None:
        """Do `work` on the thread, before the next step of steady work; it must not raise."""
        self._queue(work)

    def run_steadily(self, step: Step) -> None:
        """Call `step` between jobs for as long as it has something to do.

        It must not refer to the worker.
        """
        self._steady.append(step)

    @property
    def add_idle(self) -> Callable[[Idle], None]:
        """Add work for idle times; called by steady work."""
        return self._idle.append

    @property
    def busy_s(self) -> float:
        """Seconds since the current job or step began; 0 when idle, infinite after the end."""
        if not self._thread.is_alive():
            return math.inf
        since = self._pulse.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def at_end(self, ending: Callable[[], None]) -> None:
        """Register a call for the end of the thread; it must not refer to the worker."""
        self._endings.append(ending)

    def drain(self) -> None:
        """Wait until all work that was queued before is done, idle work too."""
        self.call(partial(_finish_idle, self._idle))

    def close(self) -> None:
        """Finish queued work except idle work, and end the thread."""
        self.check_caller()
        with self._lock:
            self._is_closed = True
        self._end()

    def check_caller(self) -> None:
        """Refuse calls that come from the thread itself."""
        if threading.current_thread() is self._thread:
            raise KVBoostError("called from the engine's own thread, which would wait for itself")

    def _queue(self, job: Callable[[], object]) -> None:
        self.check_caller()
        if os.getpid() != self._process_id:  # a fork copies no threads
            raise KVBoostError("this process was forked from the engine's: create an engine here")
        with self._lock:
            if self._is_closed:
                raise KVBoostError("the engine is closed")
            self._jobs.put(job)


class CallerThread:
    """Does work at once, on the thread that asks for it; idle work is dropped. For measuring."""

    def __init__(self) -> None:
        self._steady: list[Step] = []

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do `work`."""
        reply: Future[T] = Future()
        _fulfil(reply, work)
        return reply

    def post(self, work: Callable[[], object]) -> None:
        """Do `work`, and steady work to its end."""
        work()
        while (due_s := _step_all(self._steady)) is not None:
            time.sleep(due_s)

    def run_steadily(self, step: Step) -> None:
        """See `Worker`."""
        self._steady.append(step)

    def add_idle(self, idle: Idle) -> None:
        """Drop it."""

    def check_caller(self) -> None:
        """Any thread may call."""


def _loop(jobs: Jobs, idle: deque[Idle], steady: list[Step], pulse: Pulse, quiet_s: float) -> None:
    """Run jobs as they come; steady work between them, and idle work when nothing else is due.

    Steady work waits while jobs keep coming, up to `MOST_BUSY_S`. Idle work waits for `quiet_s`
    without jobs and steady work, or until it is overdue.
    """
    patience, due_s, busy_s = quiet_s, None, 0.0
    overdue_at = 0.0
    while True:
        pulse.busy_since = None
        job = _next(jobs, due_s if due_s is not None else patience if idle else None)
        pulse.busy_since = time.monotonic()
        if job is None:
            break
        is_quiet = job is _nothing and due_s is None
        is_due = job is _nothing and not is_quiet
        if job is not _nothing:
            started_at = time.perf_counter()
            job()
            busy_s += time.perf_counter() - started_at
            due_s = 0.0 if steady else None  # more jobs first: they may join the same step
            is_due = busy_s > MOST_BUSY_S
        del job  # or it would keep the last request alive until the next one
        if is_due:
            due_s, busy_s = _step_all(steady), 0.0
        patience = 0.0 if is_quiet else quiet_s
        now = time.perf_counter()
        if not idle:
            overdue_at = max(overdue_at, now + OVERDUE_S)
        elif is_quiet or now > overdue_at:
            _step(idle)
            took_s = time.perf_counter() - now
            overdue_at = now + max(OVERDUE_S, took_s / OVERDUE_SHARE)
    while due_s is not None:
        time.sleep(due_s)
        due_s = _step_all(steady)


def _next(jobs: Jobs, timeout_s: float | None) -> Callable[[], object] | None:
    """The next job, `_nothing` if none comes in time, None at the end."""
    try:
        return jobs.get(timeout=timeout_s)
    except queue.Empty:
        return _nothing


def _nothing() -> None:
    """Stands in for a job that did not come."""


def _step_all(steady: list[Step]) -> float | None:
    return min((due_s for step in steady if (due_s := step()) is not None), default=None)


def _finish(jobs: Jobs, thread: threading.Thread, endings: list[Callable[[], None]]) -> None:
    """End the thread; also called when the worker was dropped or Python ends."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
    for ending in endings:
        ending()


def _step(idle: deque[Idle]) -> None:
    """One step of the oldest idle work."""
    try:
        next(idle[0])
    except StopIteration:
        idle.popleft()
    except Exception:
        idle.popleft()
        log.exception("idle work failed")


def _finish_idle(idle: deque[Idle]) -> None:
    while idle:
        _step(idle)


def _fulfil(reply: Future[T], work: Callable[[], T]) -> None:
    try:
        reply.set_result(work())
    except BaseException as error:
        reply.set_exception(error)
