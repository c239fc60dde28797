"""plan -> positions to repair. Strategies that select moved tokens; they run nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvboost.core import LONGEST_QUESTION, ReusePlan, Span

if TYPE_CHECKING:
    import numpy.typing as npt

    Scores = npt.NDArray[np.float32]
    """A number for each position of the prompt: the higher, the more it wants repair."""

# Shares of a run's recomputed tokens: at most the first for its head; of the rest, the second for
# evenly spaced tokens, and what remains for tokens near the question's words.
HEAD_PART, EVEN_PART = 1 / 3, 0.6
NEAR_TOKENS = 8.0  # distance at which a word of the question counts a third
REACH = 24
SAMPLED_PART = 0.2  # of QueryRepair's tokens; passages get the rest
PASSAGE_REACH = 6  # tokens on each side that attention to a token counts for


class Evidence(Protocol):
    """Measurements of moved K/V that a strategy may ask for."""

    tokens: Sequence[int]  # of the prompt

    def deviation(self) -> Scores:
        """Distance of the first layers' K/V from a full prefill. Costly."""

    def attention(self) -> Scores:
        """Attention from the end of the prompt to each position, in a few middle layers. Costly."""


class Repair(ABC):
    """Chooses which moved tokens the sparse prefill computes again."""

    @abstractmethod
    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """Positions to compute again, sorted and inside moved spans."""

    def expected_rows(self, plan: ReusePlan) -> int:
        """Estimate of how many positions `select` chooses, without evidence."""
        return 0

    def corrected(self, plan: ReusePlan) -> list[Span]:
        """Spans whose other tokens are adjusted by the change of the computed ones."""
        return []


class NoRepair(Repair):
    """Keeps what was placed: the baseline that every strategy is measured against."""

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """Nothing."""
        return []


class SelectiveRepair(Repair):
    """Computes the heads of runs, which saw the beginning of another text."""

    def __init__(self, head_tokens: int) -> None:
        self._head_tokens = head_tokens

    def expected_rows(self, plan: ReusePlan) -> int:
        """The head of each run, as long as it is."""
        return sum(min(len(run), self._head_tokens) for run in plan.moved)

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """The first tokens of each run."""
        heads = ((run.start, min(run.start + self._head_tokens, run.stop)) for run in plan.moved)
        return [position for head in heads for position in range(*head)]


class CacheBlendRepair(Repair):
    """Computes the tokens whose first layers deviate most from a full prefill."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def expected_rows(self, plan: ReusePlan) -> int:
        """The ratio, times the moved tokens."""
        return round(self._ratio * sum(len(run) for run in plan.moved))

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """The highest deviations."""
        return highest(evidence.deviation(), plan, self._ratio) if plan.moved else []


class SampledRepair(Repair):
    """Computes the head of each run, evenly spaced tokens, and those around the question's words.

    What counts for the correction of the rows between is the distance to the next computed row; the
    answer is read from what stands near the question's words. How the other rows are corrected is
    in `kvboost.models.spread`. Heads tell nothing about the rows after them: they stood near the
    beginning of something else, which changed them alone.
    """

    def __init__(self, ratio: float, head_tokens: int) -> None:
        self._ratio, self._head_tokens = ratio, head_tokens

    def expected_rows(self, plan: ReusePlan) -> int:
        """The ratio, times the moved tokens, and at least the ends of each run."""
        runs = plan.moved
        ends = 2 * len(runs) if self._ratio > 0 else 0
        return max(ends, round(self._ratio * sum(len(run) for run in runs)))

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """All three; where the question's words say nothing, more evenly spaced ones."""
        runs = plan.moved
        if not runs or self._ratio == 0:
            return []
        if self._ratio >= 1:
            return [position for run in runs for position in range(run.start, run.stop)]
        num_moved = sum(len(run) for run in runs)
        heads = [p for run in runs for p in range(run.start, self._head_stop(run))]
        left = self._ratio - len(heads) / num_moved
        near = near_question_words(plan, evidence.tokens)
        near[heads] = 0.0
        asked = highest(near, plan, left * (1 - EVEN_PART))
        asked = [position for position in asked if near[position] > 0]
        even = _evenly(self.corrected(plan), left - len(asked) / num_moved)
        return sorted({*heads, *asked, *even})

    def corrected(self, plan: ReusePlan) -> list[Span]:
        """The runs without their heads."""
        bodies = [Span(self._head_stop(run), run.stop) for run in plan.moved]
        return [body for body in bodies if len(body) > 1]

    def _head_stop(self, run: Span) -> int:
        most = round(HEAD_PART * self._ratio * len(run))
        return run.start + min(self._head_tokens, most)


class QueryRepair(SampledRepair):
    """Computes the passages that the question attends to, and a small sample to correct the rest.

    Whole passages, not single tokens: what an answer is read from has to fit together.
    """

    def __init__(self, ratio: float, head_tokens: int) -> None:
        sampled = SAMPLED_PART * ratio if ratio < 1 else 1.0
        super().__init__(sampled, head_tokens)
        self._read_ratio = ratio - sampled if ratio < 1 else 0.0

    def expected_rows(self, plan: ReusePlan) -> int:
        """Both parts."""
        return super().expected_rows(plan) + round(self._read_ratio * sum(map(len, plan.moved)))

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """Both parts; tokens in both are computed once."""
        sampled = super().select(plan, evidence)
        if not plan.moved or self._read_ratio == 0:
            return sampled
        attention = evidence.attention()
        read = np.zeros_like(attention)
        window = np.ones(2 * PASSAGE_REACH + 1, np.float32)
        for run in plan.moved:  # by itself: attention to its neighbours says nothing about it
            summed = np.convolve(attention[run.start : run.stop], window)
            read[run.start : run.stop] = summed[PASSAGE_REACH : PASSAGE_REACH + len(run)]
        return sorted({*sampled, *highest(read, plan, self._read_ratio)})


def near_question_words(plan: ReusePlan, tokens: Sequence[int]) -> Scores:
    """How near each position is to tokens of the question; rare tokens count more."""
    end = plan.live[-1]
    question = set(tokens[max(end.start, end.stop - LONGEST_QUESTION) : end.stop])
    counts = Counter(tokens)
    scores = np.zeros(plan.num_tokens, np.float32)
    for run in plan.moved:
        hits = [1 / counts[t] if t in question else 0.0 for t in tokens[run.start : run.stop]]
        near = np.exp(-np.abs(np.arange(-REACH, REACH + 1)) / NEAR_TOKENS)
        scores[run.start : run.stop] = np.convolve(hits, near)[REACH : REACH + len(run)]
    return scores


def _evenly(runs: Sequence[Span], ratio: float) -> list[int]:
    chosen: list[int] = []
    for run in runs:
        count = min(len(run), max(2, round(ratio * len(run))))
        last = len(run) - 1
        chosen += [run.start + round(step * last / (count - 1)) for step in range(count)]
    return chosen


def highest(scores: Scores, plan: ReusePlan, ratio: float) -> list[int]:
    """The `ratio` of all moved positions with the highest scores, sorted."""
    moved = np.array([p for run in plan.moved for p in range(run.start, run.stop)], np.int64)
    count = round(ratio * len(moved))
    chosen = moved[np.argsort(-scores[moved], kind="stable")[:count]]
    return [int(position) for position in np.sort(chosen)]
