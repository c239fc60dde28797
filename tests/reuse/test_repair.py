"""What every strategy must keep to, and what each of them chooses."""

from __future__ import annotations

import numpy as np
import pytest

from kvboost.build import build_repair
from kvboost.config import STRATEGIES, Options
from kvboost.core import FrameKey, Match, MatchKind, PrefixKey, ReusePlan, Span
from kvboost.reuse.repair import near_question_words

KEY: FrameKey = PrefixKey(b"key")


def match(start: int, stop: int, kind: MatchKind, *, follows: bool = False) -> Match:
    return Match(Span(start, stop), KEY, stop - start, kind, follows=follows)


PLAN = ReusePlan(
    600,
    (
        match(0, 64, MatchKind.EXACT),
        match(70, 200, MatchKind.MOVED),
        match(200, 300, MatchKind.MOVED, follows=True),
        match(300, 420, MatchKind.MOVED),
        match(425, 430, MatchKind.MOVED),
        match(440, 560, MatchKind.MOVED),
    ),
)
RUNS = [Span(70, 300), Span(300, 420), Span(425, 430), Span(440, 560)]


class Evidence:
    tokens = [p % 97 for p in range(560)] + [5] * 40

    def deviation(self) -> np.ndarray:
        return np.arange(600, dtype=np.float32)

    attention = deviation


def select(strategy: str, ratio: float = 0.1, **options: int) -> list[int]:
    made = Options(recompute_strategy=strategy, recompute_ratio=ratio, **options)
    return build_repair(made, ratio).select(PLAN, Evidence())


def test_a_run_is_what_was_computed_together() -> None:
    assert list(PLAN.moved) == RUNS


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_only_moved_positions_are_chosen_in_order_and_once(strategy: str, ratio: float) -> None:
    chosen = select(strategy, ratio)
    moved = [position for run in RUNS for position in range(run.start, run.stop)]
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(moved)
    if ratio == 1.0 and strategy not in ("none", "selective"):
        assert chosen == moved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_nothing_was_moved_nothing_is_chosen(strategy: str) -> None:
    made = build_repair(Options(recompute_strategy=strategy), 0.15)
    assert made.select(ReusePlan(600, PLAN.matches[:1]), Evidence()) == []
    assert made.corrected(ReusePlan(600)) == []


def test_cacheblend_takes_the_highest_deviations() -> None:
    assert select("cacheblend", 0.1) == list(range(560 - 48, 560))  # a tenth of 475


def test_a_query_takes_the_passage_that_it_reads_and_samples_the_rest() -> None:
    evidence = Evidence()
    evidence.attention = lambda: np.eye(1, 600, 200, dtype=np.float32)[0]  # type: ignore[method-assign]
    made = build_repair(Options(recompute_strategy="query"), 0.05)
    chosen = made.select(PLAN, evidence)
    assert set(range(194, 207)) <= set(chosen)
    assert all(any(run.start <= p < run.stop for p in chosen) for run in RUNS)
    assert len(chosen) <= made.expected_rows(PLAN) + len(RUNS)
    at_border = np.zeros(600, np.float32)
    at_border[69] = at_border[560] = 1.0  # live text beside moved text
    evidence.attention = lambda: at_border  # type: ignore[method-assign]
    assert 559 - 5 not in made.select(PLAN, evidence)


def test_selective_takes_heads() -> None:
    heads = [*range(70, 74), *range(300, 304), *range(425, 429), *range(440, 444)]
    assert select("selective", recompute_overlap=4) == heads


def test_a_sample_has_heads_and_leaves_no_wide_gaps() -> None:
    chosen = select("sampled", 0.1, recompute_overlap=4)
    for run, head in zip(RUNS, (4, 4, 0, 4), strict=True):
        inside = [p for p in chosen if run.start <= p < run.stop]
        assert inside[:head] == list(range(run.start, run.start + head))
        assert inside[-1] == run.stop - 1
        assert max(np.diff(inside), default=0) <= 50
    assert 0.08 * 475 <= len(chosen) <= 0.12 * 475


def test_words_of_the_question_draw_the_sample() -> None:
    near = near_question_words(PLAN, Evidence.tokens)
    places = [p for run in RUNS for p in range(run.start, run.stop)]
    best = max(places, key=lambda place: near[place])
    assert Evidence.tokens[best] == 5
    assert near[:70].max() == 0
