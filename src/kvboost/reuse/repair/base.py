"""The `Repair` contract: a strategy is a choice of positions, not a second way to run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvboost.core import ReusePlan, Span


class Repair(ABC):
    """Chooses the set S of positions that one sparse prefill computes."""

    @abstractmethod
    def select(self, plan: ReusePlan) -> tuple[Span, ...]:
        """Sorted spans that cover at least `plan.live`; the rest is kept as it was placed."""
