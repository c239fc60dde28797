"""Seams: the first tokens of each moved run, which saw the beginning of another text instead."""

from __future__ import annotations

from kvboost.core import ReusePlan
from kvboost.reuse.repair.base import Evidence, Repair


class SelectiveRepair(Repair):
    """Computes the heads of runs and, if asked, their tails."""

    def __init__(self, head_tokens: int, tail_tokens: int = 0) -> None:
        self._head_tokens, self._tail_tokens = head_tokens, tail_tokens

    def expected_rows(self, plan: ReusePlan) -> int:
        """Head and tail of each run, as long as it is."""
        each = self._head_tokens + self._tail_tokens
        return sum(min(len(run), each) for run in plan.moved)

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """The first and last tokens of each run."""
        chosen: set[int] = set()
        for run in plan.moved:
            chosen |= set(range(run.start, min(run.start + self._head_tokens, run.stop)))
            chosen |= set(range(max(run.stop - self._tail_tokens, run.start), run.stop))
        return sorted(chosen)
