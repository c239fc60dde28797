"""Strategies that rank the moved tokens and compute the highest `ratio` of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvboost.core import ReusePlan
from kvboost.reuse.repair.base import Evidence, Repair, highest

if TYPE_CHECKING:
    from kvboost.reuse.repair.base import Scores


class ScoredRepair(Repair):
    """Computes the tokens that score highest.

    By deviation this is CacheBlend, by attention what newer methods do (the tokens that the
    question looks at), by sensitivity a ranking made when the text was stored.
    """

    def __init__(self, ratio: float, score: Callable[[Evidence], Scores]) -> None:
        self._ratio, self._score = ratio, score

    def expected_rows(self, plan: ReusePlan) -> int:
        """The ratio of what is moved."""
        return round(self._ratio * sum(len(run) for run in plan.moved))

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """The highest scores."""
        return highest(self._score(evidence), plan, self._ratio) if plan.moved else []
