"""The quality budget: audits decide how much moved text is repaired, and whether it is used."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

NUM_TRIALS = 4
"""Audits of the first answers at each repair ratio; as many decide whether it is raised."""

NUM_RECENT = 16

MOST_UNJUDGED = 64
"""Answers at a ratio, before its trials are done, after which moved text waits for them."""

MOST_WAITING = 8
"""Audits that wait for idle time: each keeps the logits of an answer."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """On what terms a tenant may reuse moved text now."""

    allows_moved: bool
    ratio: float
    note: str = ""


@dataclass
class _State:
    level: int = 0
    num_answers: int = 0  # on moved K/V at this level
    num_waiting: int = 0  # audits that were asked for
    num_audits: int = 0
    kls: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    top1s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    note: str = ""


class QualityGuard:
    """Raises the repair ratio of a tenant, then takes moved text away, when audits exceed a budget.

    The first `NUM_TRIALS` answers at each ratio are audited, then a sampled share. Thread-safe.
    """

    def __init__(self, budget_kl: float, ratios: Sequence[float], audit_ratio: float) -> None:
        self._budget_kl, self._ratios, self._audit_ratio = budget_kl, tuple(ratios), audit_ratio
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._num_waiting = 0

    def terms(self, tenant: str) -> Allowance:
        """What holds for the next request."""
        with self._lock:
            state = self._states.get(tenant, _State())
            is_allowed, note = state.level < len(self._ratios), state.note
            if is_allowed and state.num_answers >= MOST_UNJUDGED and len(state.kls) < NUM_TRIALS:
                is_allowed, note = False, "moved text waits for its first audits, in idle time"
            ratio = self._ratios[min(state.level, len(self._ratios) - 1)]
            return Allowance(is_allowed, ratio, note)

    def wants_audit(self, tenant: str) -> bool:
        """Count an answer on moved K/V; whether it shall be audited.

        Each audit that is wanted must end in `record` or `abandon`.
        """
        with self._lock:
            state = self._states.setdefault(tenant, _State())
            state.num_answers += 1
            sampled = int(state.num_answers * self._audit_ratio)
            is_sampled = sampled > int((state.num_answers - 1) * self._audit_ratio)
            is_trial = len(state.kls) + state.num_waiting < NUM_TRIALS
            if self._num_waiting >= MOST_WAITING or not (is_trial or is_sampled):
                return False
            state.num_waiting += 1
            self._num_waiting += 1
            return True

    def record(self, tenant: str, ratio: float, kl: float, top1: float) -> None:
        """Take note of an audit, asked for by `wants_audit`, of an answer made at `ratio`."""
        with self._lock:
            state = self._states.setdefault(tenant, _State())
            state.num_waiting -= 1
            self._num_waiting -= 1
            if state.level >= len(self._ratios) or ratio != self._ratios[state.level]:
                return  # the ratio was raised since
            state.num_audits += 1
            state.kls.append(kl)
            state.top1s.append(top1)
            mean = sum(state.kls) / len(state.kls)
            if len(state.kls) >= NUM_TRIALS and mean > self._budget_kl:
                self._raise_level(tenant, state, mean)

    def abandon(self, tenant: str) -> None:
        """An audit that was asked for will not come."""
        with self._lock:
            self._states[tenant].num_waiting -= 1
            self._num_waiting -= 1

    def snapshot(self) -> dict[str, dict[str, object]]:
        """Per tenant: what holds and what the recent audits found."""
        with self._lock:
            return {
                tenant: {
                    "moved_allowed": state.level < len(self._ratios),
                    "recompute_ratio": self._ratios[min(state.level, len(self._ratios) - 1)],
                    "audits": state.num_audits,
                    "mean_kl": sum(state.kls) / len(state.kls) if state.kls else None,
                    "mean_top1": sum(state.top1s) / len(state.top1s) if state.top1s else None,
                    "note": state.note,
                }
                for tenant, state in self._states.items()
            }

    def _raise_level(self, tenant: str, state: _State, mean: float) -> None:
        state.level += 1
        state.num_answers = 0
        found = f"audits found a mean KL of {mean:.3f}, the budget is {self._budget_kl:.3f}"
        if state.level < len(self._ratios):
            state.note = f"repair ratio raised to {self._ratios[state.level]:.2f}: {found}"
            state.kls.clear()
            state.top1s.clear()
        else:
            state.note = f"moved text is not reused any more: {found}"
        log.warning("tenant %r: %s", tenant, state.note)
