"""No repair: right for exact reuse, and the baseline that every strategy is measured against."""

from kvboost.core import ReusePlan, Span
from kvboost.reuse.repair.base import Repair


class NoRepair(Repair):
    """Computes what is live and nothing else."""

    def select(self, plan: ReusePlan) -> tuple[Span, ...]:
        """The live spans."""
        return plan.live
