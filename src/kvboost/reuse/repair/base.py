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
    """What can be found out about the placed rows before they are repaired."""

    tokens: Sequence[int]  # of the prompt

    def deviation(self) -> Scores:
        """How far K and V of the first layers are from what the model computes here. Costly."""

    def attention(self) -> Scores:
        """How much the question looks at each position, over a few middle layers. Costly."""

    def sensitivity(self) -> Scores:
        """How much each row was found to depend on its context when it was stored; 0: unknown."""


class Repair(ABC):
    """Chooses the moved rows that one sparse prefill computes besides the live ones."""

    @abstractmethod
    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """Sorted positions inside moved spans; the other rows are kept as they were placed."""

    def expected_rows(self, plan: ReusePlan) -> int:
        """About how many positions `select` will choose, without any evidence."""
        return 0

    def corrected(self, plan: ReusePlan) -> list[Span]:
        """Spans whose other rows are corrected by how the computed ones in them have changed."""
        return []


def highest(scores: Scores, plan: ReusePlan, ratio: float) -> list[int]:
    """The `ratio` of all moved positions with the highest scores, sorted."""
    moved = np.array([p for run in plan.moved for p in range(run.start, run.stop)], np.int64)
    count = round(ratio * len(moved))
    chosen = moved[np.argsort(-scores[moved], kind="stable")[:count]]
    return [int(position) for position in np.sort(chosen)]
