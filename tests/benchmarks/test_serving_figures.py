"""The arithmetic of the serving benchmarks, with engines that answer by rule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.common.measure import Peak
from benchmarks.serving import throughput
from benchmarks.serving.stalls import gaps


class Words:
    """A tokenizer: a token for each letter."""

    def __call__(self, text: str, **arguments: Any) -> argparse.Namespace:
        return argparse.Namespace(input_ids=[ord(letter) % 256 for letter in text[:5000]])


class Rule:
    """A worker that answers with the sum of the prompt, `num_missing` tokens too short."""

    def __init__(self, num_missing: int = 0) -> None:
        self.num_missing = num_missing
        self.asked: list[list[int]] = []

    def traffic(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self.asked += [each["tokens"] for each in requests]
        return [
            {"tokens": [sum(each["tokens"])] * (each["num_new"] - self.num_missing)}
            for each in requests
        ]

    def rest(self) -> None:
        pass


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(throughput, "tokenizer", lambda name: Words())
    return argparse.Namespace(model="m", clients=3, shared=40, own=10, new=8, rounds=2)


def test_all_engines_get_the_same_prompts_and_no_round_has_those_of_another(
    options: argparse.Namespace,
) -> None:
    workers = {"ours": Rule(), "transformers": Rule(), "vllm": Rule()}
    times, answers = throughput._measure(workers, options)
    assert {who: len(took) for who, took in times.items()} == {
        "ours": 2, "ours warm": 2, "transformers": 2, "vllm": 2, "vllm warm": 2
    }  # fmt: skip
    assert answers["ours"] == answers["transformers"] == answers["vllm"]
    asked = workers["ours"].asked
    starts = [tuple(prompt[:40]) for prompt in asked]
    assert len(set(starts)) == 1 + options.rounds  # of the warm-up and of each round
    assert len({tuple(prompt) for prompt in asked}) == len(asked)
    assert {len(prompt) for prompt in asked} == {50}


def test_short_answers_are_an_error(options: argparse.Namespace) -> None:
    with pytest.raises(RuntimeError, match="cb: answers have"):
        throughput._measure({"ours": Rule(), "cb": Rule(num_missing=1)}, options)


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


def test_a_peak_is_seen() -> None:
    seen: list[int] = []

    def read() -> int:
        seen.append(100 if len(seen) == 2 else 5)
        return seen[-1]

    with Peak(read, 0.001) as peak:
        while len(seen) < 4:
            pass
    assert peak.most == 100
