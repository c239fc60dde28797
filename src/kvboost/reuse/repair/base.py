"""The `Repair` contract: a strategy is a choice of positions, not a second way to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvboost.core import ReusePlan, Span

if TYPE_CHECKING:
    import numpy.typing as npt

    Scores = npt.NDArray[np.float32]
    """A number for each position of the prompt: the higher, the more it wants repair."""


class Evidence(Protocol):
    """Measurements of moved K/V that a strategy may ask for."""

    tokens: Sequence[int]  # of the prompt

    def deviation(self) -> Scores:
        """Distance of the first layers' K/V from a full prefill. Costly."""

    def attention(self) -> Scores:
        """Attention from the end of the prompt to each position, in a few middle layers. Costly."""

    def sensitivity(self) -> Scores:
        """How much each token's K/V depends on its context, measured by `warm`; 0: unknown."""


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


def highest(scores: Scores, plan: ReusePlan, ratio: float) -> list[int]:
    """The `ratio` of all moved positions with the highest scores, sorted."""
    moved = np.array([p for run in plan.moved for p in range(run.start, run.stop)], np.int64)
    count = round(ratio * len(moved))
    chosen = moved[np.argsort(-scores[moved], kind="stable")[:count]]
    return [int(position) for position in np.sort(chosen)]
