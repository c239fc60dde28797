"""The worker: requests in order, idle work in between, step by step."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from kvboost.engine import worker as worker_module
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

    worker.call(lambda: worker.add_idle(last()))
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

    worker.call(lambda: worker.add_idle(slow()))
    assert started.wait(10)
    reply = worker.start(lambda: log.append("request"))
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

    worker.call(lambda: worker.add_idle(broken()))
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


def test_steady_work_has_its_steps_though_jobs_always_wait(worker: Worker) -> None:
    log: list[str] = []
    held = threading.Event()

    def step() -> float | None:
        log.append("step")
        return 0.0 if len(log) < 50 else None

    def job() -> None:
        time.sleep(2 * worker_module.MOST_BUSY_S)
        log.append("job")

    worker.run_steadily(step)
    worker.post(lambda: held.wait(10))
    for _ in range(5):
        worker.post(job)
    held.set()
    worker.call(lambda: None)
    assert log[:3].count("step") >= 1 and log.count("step") >= 4


def test_quick_jobs_go_before_a_step_so_that_it_can_take_them_all(worker: Worker) -> None:
    log: list[str] = []
    begun, held = threading.Event(), threading.Event()

    def step() -> float | None:
        if not begun.is_set():
            begun.set()
            held.wait(10)
            return 0.0
        log.append("step")
        return None

    worker.run_steadily(step)
    worker.post(lambda: None)
    assert begun.wait(10)
    for _ in range(5):
        worker.post(lambda: log.append("job"))
    held.set()
    worker.call(lambda: None)
    assert log[:5] == ["job"] * 5


def test_idle_work_goes_on_though_it_is_never_quiet(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "OVERDUE_S", 0.01)
    log: list[str] = []
    worker.run_steadily(lambda: 0.0 if len(log) < 3 else None)
    worker.add_idle(steps(log, "audit", 3))
    worker.post(lambda: None)
    for _ in range(500):
        if len(log) == 3:
            break
        time.sleep(0.01)
    assert log == ["audit0", "audit1", "audit2"]


def test_the_thread_cannot_close_itself(worker: Worker) -> None:
    with pytest.raises(KVBoostError, match="engine's own thread"):
        worker.call(worker.close)
    assert worker.call(lambda: 7) == 7


def test_it_tells_for_how_long_it_is_busy_with_one_thing(worker: Worker) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(10)

    assert worker.busy_s < 5
    reply = worker.start(slow)
    assert begun.wait(10)
    time.sleep(0.05)
    assert worker.busy_s > 0.04
    go_on.set()
    reply.result()
    ended = Worker()
    ended.close()
    assert ended.busy_s == float("inf")


IN_A_FORKED_CHILD = """
import os
from kvboost.engine.worker import Worker
from kvboost.errors import KVBoostError

worker = Worker()
child = os.fork()
if child == 0:
    try:
        worker.call(lambda: 1)
    except KVBoostError as error:
        print(error, flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
print(worker.call(lambda: 2))
worker.close()
"""


def test_a_forked_child_is_told_that_the_thread_is_not_there() -> None:
    told = subprocess.check_output([sys.executable, "-c", IN_A_FORKED_CHILD], text=True)
    error, two = told.splitlines()
    assert "forked" in error
    assert two == "2"
