"""Threads that save and write behind leave the cores to the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes import FaultyTier, store_of
from kvboost.tiers import behind
from kvboost.tiers.behind import NICENESS, give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have their own niceness")

# As vLLM starts a worker: OpenMP binds each thread that shares out work, unless it uses one core.
BOUND = """
import json, os, threading, torch
from kvboost.tiers.behind import give_way

numbers = torch.zeros(2**20)
numbers.exp()  # the model: OpenMP starts its threads

def work(told):
    give_way(3)
    numbers.exp()
    told += [os.nice(0), sorted(os.sched_getaffinity(0)), torch.get_num_threads()]

told = []
thread = threading.Thread(target=work, args=(told,))
thread.start()
thread.join()
print(json.dumps([*told, os.nice(0), torch.get_num_threads()]))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_a_thread_beside_a_bound_model_uses_one_core_but_any() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": f"{first} {second}"}
    done = subprocess.run(
        [sys.executable, "-c", BOUND], env=environment, stdout=subprocess.PIPE, check=True
    )
    niceness, cores, num_threads, model_niceness, model_threads = json.loads(done.stdout)
    assert cores == [first, second]
    assert (num_threads, model_threads) == (1, 2)
    assert niceness == min(19, model_niceness + 3)


def test_where_the_system_forbids_it_a_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(behind.os, "nice", refuse)
    monkeypatch.setattr(behind.os, "sched_setaffinity", refuse)
    with ThreadPoolExecutor(1, initializer=give_way, initargs=(NICENESS,)) as threads:
        assert threads.submit(threading.get_ident).result() != threading.get_ident()


def test_what_writes_below_gives_way() -> None:
    before = {each.native_id for each in threading.enumerate()}
    store = store_of(below=[FaultyTier()])
    try:
        assert store.tiers.flush(5)
        started = [each for each in threading.enumerate() if each.native_id not in before]
        (writer,) = (each for each in started if each.name.endswith("behind"))
        assert writer.native_id is not None
        niceness = os.getpriority(os.PRIO_PROCESS, writer.native_id)
        assert niceness == min(19, os.nice(0) + NICENESS)
    finally:
        store.tiers.close()
