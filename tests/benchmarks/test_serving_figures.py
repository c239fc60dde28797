"""The arithmetic of the serving benchmarks, with engines that answer by rule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest

import throughput
from kvbytes import Peak
from stalls import gaps


class Words:
    """A tokenizer: a token for each letter."""

    def __call__(self, text: str, **arguments: Any) -> argparse.Namespace:
        return argparse.Namespace(input_ids=[ord(letter) % 256 for letter in text[:5000]])


class Rule:
    """Answers with the sum of the prompt, `num_missing` tokens too short."""

    about: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *, has_cache: bool = False, num_missing: int = 0) -> None:
        self.has_cache = has_cache
        self.num_missing = num_missing
        self.asked: list[list[int]] = []

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        self.asked += prompts
        return [[sum(prompt)] * (num_new - self.num_missing) for prompt in prompts]

    def close(self) -> None:
        pass


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(throughput, "tokenizer", lambda name: Words())
    return argparse.Namespace(clients=3, shared=40, own=10, new=8, rounds=2)


def test_all_engines_get_the_same_prompts_and_no_round_has_those_of_another(
    options: argparse.Namespace,
) -> None:
    batchers = {"ours": Rule(has_cache=True), "transformers": Rule(), "vllm": Rule(has_cache=True)}
    times, answers = throughput._measure("m", batchers, options)
    assert {who: len(took) for who, took in times.items()} == {
        "ours": 2, "ours warm": 2, "transformers": 2, "vllm": 2, "vllm warm": 2
    }  # fmt: skip
    assert answers["ours"] == answers["transformers"] == answers["vllm"]
    asked = batchers["ours"].asked
    starts = [tuple(prompt[:40]) for prompt in asked]
    assert len(set(starts)) == 1 + options.rounds  # of the warm-up and of each round
    assert len({tuple(prompt) for prompt in asked}) == len(asked)
    assert {len(prompt) for prompt in asked} == {50}


def test_short_answers_are_an_error(options: argparse.Namespace) -> None:
    with pytest.raises(RuntimeError, match="cb: answers have"):
        throughput._measure("m", {"ours": Rule(), "cb": Rule(num_missing=1)}, options)


def test_rows_hold_medians_ratios_and_agreement(options: argparse.Namespace) -> None:
    times = {"ours": [1.0, 2.0, 4.0], "ours warm": [0.5] * 3, "transformers": [8.0, 8.0, 8.0]}
    same, other = [[1], [2], [3]], [[1], [2], [9]]
    rows = throughput._rows(
        times, {"ours": other, "ours warm": same, "transformers": same}, options
    )
    ours, warm, bare = rows
    assert (ours["tokens_per_s"], ours["low"], ours["high"]) == (12.0, 6.0, 24.0)
    assert (ours["same"], ours["answers"]) == (2, 3)
    assert "same" not in warm
    assert (bare["ours_ratio"], bare["goal"]) == (4.0, 6.0)


def test_gaps_are_those_that_reach_into_the_time() -> None:
    times = [[0.0, 1.0, 3.0, 10.0, 11.0], [2.5, 4.5]]
    assert gaps(times, 2.0, 5.0) == [2.0, 7.0, 2.0]
    assert gaps(times, 10.5) == [1.0]
    assert gaps([[], [1.0]], 0.0) == []


def test_the_peak_of_a_batch_is_seen() -> None:
    class Engine:
        calls = 0

        def batch_stats(self) -> dict[str, int]:
            self.calls += 1
            return {"kv_bytes": 100 if self.calls == 2 else 5, "num_running": self.calls}

    engine = Engine()
    with Peak(engine) as peak:
        while engine.calls < 4:
            pass
    assert (peak.size_bytes, peak.num_running) == (100, 2)
    assert peak.most_running >= 4
