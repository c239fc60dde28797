"""The load test finds what it looks for, on a server with chosen faults."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

import pytest

from benchmarks.common.measure import resident_mb
from benchmarks.serving import soak
from benchmarks.serving.soak import ABORTED, GAVE_UP, Tally, growth
from benchmarks.serving.soak_questions import Question, make_questions, tellable, text_of
from fake_openai import NUM_ALONE, FakeServer, serving


def row_of(server: FakeServer, **changes: object) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    with serving(server.app) as url:
        options = parser.parse_args(["--url", url])
        options.minutes, options.clients, options.burst_every = 0.025, 4, 0.3
        options.questions = NUM_ALONE
        vars(options).update(changes)
        return soak.run(options)[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "RETRY_S", 0.02)
    monkeypatch.setattr(soak, "SETTLE_S", 0.5)
    monkeypatch.setattr(soak, "SAMPLE_S", 0.05)
    monkeypatch.setattr(soak, "PAUSE_S", 0.01)
    monkeypatch.setattr(soak, "OVERSIZE_BYTES", 2**21)
    weights = dict.fromkeys(soak.KINDS, 5) | {"whole": 20, "stream": 20, "burst": 0}
    even = {name: replace(kind, weight=weights[name]) for name, kind in soak.KINDS.items()}
    monkeypatch.setattr(soak, "KINDS", even)


def test_a_good_server_passes() -> None:
    row = row_of(FakeServer(), pid=os.getpid(), max_growth=10.0)
    # A busy machine may not get round to every kind in a second.
    assert [each for each in row["violations"] if "tested nothing" not in each] == []
    assert row["growth"] is not None
    assert row["statuses"]["whole"]["200"] > 0


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("mixes answers up", "instead of"),
        ("breaks off", "broke off"),
        ("fails", "status 500"),
        ("leaves a slot behind", "left behind"),
    ],
)
def test_a_fault_is_a_violation(fault: str, seen: str) -> None:
    told: list[str] = []
    for _ in range(5):  # a busy machine may not get round to everything in one of them
        row = row_of(FakeServer(fault))
        assert row["violations"] != []
        told += [*row["violations"], *row["examples"]]
        if any(seen in each for each in told):
            return
    raise AssertionError(told)


def test_growing_memory_is_a_violation() -> None:
    row = row_of(FakeServer(), pid=os.getpid(), max_growth=-1.0)
    assert any("memory grew" in each for each in row["violations"])


def test_growth_compares_the_last_two_thirds() -> None:
    assert growth([1, 1, 1, 100, 100, 100, 105, 105, 105]) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="too few"):
        growth([1, 2])


def test_what_was_never_tested_is_told() -> None:
    tally = Tally()
    tally.add("burst", 200)
    assert tally.violations() == ["no burst request got a 503: it tested nothing"]
    tally.add("burst", 503)
    assert tally.violations() == []


def test_statuses_that_are_not_promised_are_faults() -> None:
    tally = Tally()
    for kind, status in [("whole", 500), ("whole", GAVE_UP), ("malformed", 200)]:
        tally.add(kind, status)
    tally.add("abort", ABORTED)
    assert tally.num_faults == 3
    assert tally.by_kind()["whole"] == {"-1": 1, "500": 1}


def test_questions_with_the_same_answer_are_left_out() -> None:
    questions = [Question("/", {}, "1", answer) for answer in ("a", "b", "a", "")]
    assert [each.answer for each in tellable(questions)] == ["b"]


def test_questions_are_the_same_for_a_seed_and_carry_their_marker() -> None:
    questions = make_questions(12, "m", seed=3)
    assert questions == make_questions(12, "m", seed=3) != make_questions(12, "m", seed=4)
    assert all(each.marker in str(each.body) for each in questions)
    assert len({each.marker for each in questions}) == 12
    assert len({each.path for each in questions}) == 2


def test_text_is_read_from_every_shape() -> None:
    assert text_of({"message": {"content": "a"}}) == "a"
    assert text_of({"delta": {"content": "b"}}) == "b"
    assert text_of({"delta": {}, "finish_reason": "stop"}) == ""
    assert text_of({"text": "c"}) == "c"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_process_is_seen() -> None:
    assert resident_mb(os.getpid()) > 10
