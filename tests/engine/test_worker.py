"""The worker: requests in order, idle work in between, step by step."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from kvboost.engine.worker import Worker
from kvboost.errors import KVBoostError


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(quiet_s=0.01)
    yield made
    made.close()


def steps(log: list[str], name: str, count: int) -> Iterator[None]:
    for number in range(count):
        log.append(f"{name}{number}")
        yield


def test_idle_work_runs_when_nothing_waits(worker: Worker) -> None:
    log: list[str] = []
    done = threading.Event()

    def last() -> Iterator[None]:
        yield from steps(log, "a", 3)
        done.set()

    assert worker.submit(lambda: ("result", lambda: last())).result() == "result"
    assert done.wait(10)
    assert log == ["a0", "a1", "a2"]


def test_a_request_waits_for_one_step_at_most() -> None:
    worker, log = Worker(quiet_s=0.01), []
    started, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[None]:
        started.set()
        go_on.wait(10)
        log.append("first step")
        yield
        log.append("second step")
        yield

    worker.submit(lambda: (None, lambda: slow())).result()
    assert started.wait(10)
    reply = worker.submit(lambda: (log.append("request"), lambda: None))
    go_on.set()
    reply.result()
    assert log[:2] == ["first step", "request"]
    worker.drain()
    assert log == ["first step", "request", "second step"]
    worker.close()


def test_idle_work_that_fails_harms_nobody(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Iterator[None]:
        yield
        raise RuntimeError("broken audit")

    worker.submit(lambda: (None, lambda: broken())).result()
    worker.drain()
    assert "idle work failed" in caplog.text
    assert worker.call(lambda: 7) == 7


def test_a_closed_worker_refuses_work() -> None:
    worker = Worker()
    worker.close()
    with pytest.raises(KVBoostError, match="closed"):
        worker.call(lambda: 1)


def test_a_dropped_worker_ends_and_frees_what_it_worked_on() -> None:
    class Thing:
        pass

    worker, thing = Worker(), Thing()
    seen = weakref.ref(thing)
    worker.call(lambda thing=thing: None)
    del thing
    thread = worker._thread
    gc.collect()
    time.sleep(0.05)
    assert seen() is None
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
