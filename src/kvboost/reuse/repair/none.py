"""No repair: right for exact reuse, and the baseline that every strategy is measured against."""

from kvboost.core import ReusePlan
from kvboost.reuse.repair.base import Evidence, Repair


class NoRepair(Repair):
    """Keeps what was placed."""

    def select(self, plan: ReusePlan, evidence: Evidence) -> list[int]:
        """Nothing."""
        return []
