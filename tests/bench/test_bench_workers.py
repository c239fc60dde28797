"""Workers: what they say to commands, and what a runner hears when one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost.bench import systems
from kvboost.bench.systems import OURS, SYSTEMS, WORKERS, System, WorkerProcess
from kvboost.errors import KVBoostError

FAKE = """
import os, sys, time
sys.path.insert(0, {workers!r})
import loop

class Fake(loop.System):
    def __init__(self, settings):
        print("noise before ready", settings)
        if settings.get("fails"):
            raise RuntimeError("no such model")
        self.settings, self.seen = settings, 0
    def versions(self):
        return {{"fake": "1", "path": os.environ.get("PYTHONPATH", ""), **self.settings}}
    def forget(self):
        self.seen = 0
    def ask(self, tokens, num_new):
        print("noise between answers")
        if tokens == [0]:
            raise ValueError("an empty prompt")
        if tokens == [1]:
            print("the last words", flush=True)
            os._exit(3)
        if tokens == [2]:
            time.sleep(60)
        cached, self.seen = self.seen, len(tokens)
        return loop.Answer(0.5, 2.0, tokens[:num_new], cached)

loop.serve(Fake)
"""

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a fake worker under the name of a system."""
    (tmp_path / "fake.py").write_text(FAKE.format(workers=str(WORKERS)))
    monkeypatch.setattr(systems, "WORKERS", tmp_path)
    started = []

    def begin(name: str = "fake", **settings: Any) -> WorkerProcess:
        system = System(name, "A fake", "fake.py", "own", {"own": "set"})
        worker = WorkerProcess(system, Path(sys.executable), settings, tmp_path / "log")
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        worker.close()


def test_worker_answers_and_forgets_whatever_else_prints(start: Start) -> None:
    worker = start(model="m")
    assert worker.versions["model"] == "m" and worker.versions["own"] == "set"
    first = worker.ask([5, 6, 7], 2)
    assert first == {
        "ttft_s": 0.5,
        "total_s": 2.0,
        "tokens": [5, 6],
        "num_cached": 0,
        "stages_ms": {},
    }
    assert worker.ask([5], 1)["num_cached"] == 3
    worker.rest()
    worker.forget()
    assert worker.ask([5], 1)["num_cached"] == 0


def test_errors_are_told_and_the_worker_goes_on(start: Start) -> None:
    worker = start()
    with pytest.raises(KVBoostError, match="fake: `ask` failed: ValueError: an empty prompt"):
        worker.ask([0], 1)
    assert worker.ask([9], 1)["tokens"] == [9]


def test_a_worker_that_dies_leaves_the_end_of_its_log(start: Start) -> None:
    worker = start()
    with pytest.raises(
        KVBoostError, match=r"(?s)fake ended during `ask` with code 3;.*the last words"
    ):
        worker.ask([1], 1)
    with pytest.raises(KVBoostError, match="fake"):
        worker.forget()


def test_a_worker_that_cannot_start_says_why(start: Start) -> None:
    with pytest.raises(KVBoostError, match=r"(?s)ended during `start`.*no such model"):
        start(fails=True)


def test_commands_have_a_deadline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    monkeypatch.setattr(systems, "COMMAND_S", 0.2)
    monkeypatch.setattr(systems, "LEAVE_S", 0.2)
    with pytest.raises(KVBoostError, match="did not answer `ask`"):
        worker.ask([2], 1)


def test_traffic_of_a_system_that_answers_one_at_a_time_queues(start: Start) -> None:
    requests = [{"at_s": at_s, "tokens": [5], "num_new": 1} for at_s in (0.0, -1.0)]
    first, second = start().traffic(requests)
    assert first["ttft_s"] >= 0.5
    assert second["ttft_s"] >= 1.5  # it has waited for a second
    assert first["total_s"] - first["ttft_s"] == pytest.approx(1.5)


def test_only_ours_find_our_package(start: Start) -> None:
    assert start().versions["path"] == ""
    folder = start(OURS[0]).versions["path"]
    assert [path.name for path in Path(folder).iterdir()] == ["kvboost"]
    assert (Path(folder) / "kvboost" / "bench").is_dir()


def test_every_system_has_its_worker() -> None:
    assert set(OURS) <= set(SYSTEMS)
    for name, system in SYSTEMS.items():
        assert name == system.name
        assert (WORKERS / system.worker).is_file()


@pytest.mark.model
@pytest.mark.long
def test_real_workers_agree_in_fp32(smol: str, tmp_path: Path) -> None:
    prompt = [1, *range(900, 1100)]
    settings = {"model": smol, "dtype": "fp32", "max_tokens": 512, "num_threads": 2}
    said = {}
    for name in ("transformers", "transformers-prefix", "transformers-cb", "kvboost-exact"):
        log = tmp_path / f"{name}.log"
        worker = WorkerProcess(SYSTEMS[name], Path(sys.executable), settings, log)
        try:
            cold = worker.ask(prompt, 6)
            worker.rest()
            warm = worker.ask([*prompt, 77], 6)
            worker.rest()
            worker.forget()
            again = worker.ask(prompt, 6)
        finally:
            worker.close()
        assert not cold["num_cached"] and not again["num_cached"]
        assert bool(warm["num_cached"]) == (name in ("transformers-prefix", "kvboost-exact"))
        assert 0 < cold["ttft_s"] < cold["total_s"]
        said[name] = [each["tokens"] for each in (cold, warm, again)]
        assert [len(tokens) for tokens in said[name]] == [6, 6, 6]
    assert all(tokens == said["transformers"] for tokens in said.values())
