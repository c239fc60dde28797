"""The guardrail: audits decide how much moved text is repaired, and whether it is reused."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

NUM_TRIALS = 4
"""Audits of the first answers at each repair ratio; as many decide whether it is raised."""

NUM_RECENT = 16

NUM_COUNTED = 128
"""Audits over which changed outputs are counted."""

MOST_UNJUDGED = 64
"""Answers at a ratio, before its trials are done, after which moved text waits for them."""

MOST_WAITING = 8
"""Audits that wait for idle time: each keeps the logits of an answer."""

MOST_REMEMBERED = 10_000
"""Workloads; the least recently used one is forgotten."""

AGAIN_AFTER_S = 3600.0
"""After which a workload that exceeded the budget is tried again, at the highest ratio."""


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
    changed: deque[bool] = field(default_factory=lambda: deque(maxlen=NUM_COUNTED))
    """Whether a full prefill would have worded the outputs differently."""
    top1s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    note: str = ""
    closed_at: float = 0.0  # when moved text was taken away


class QualityGuard:
    """Raises the repair ratio of a workload, then takes moved text away, as audits demand.

    They do if their mean KL is over its budget, or if even the lower end of the interval of the
    share of changed outputs is over its own. A workload is a tenant's under one adapter. The
    first `NUM_TRIALS` answers at each ratio are audited, then a sampled share. Thread-safe.
    """

    def __init__(
        self,
        budget_kl: float,
        ratios: Sequence[float],
        audit_ratio: float,
        changed_budget: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_kl, self._ratios, self._audit_ratio = budget_kl, tuple(ratios), audit_ratio
        self._changed_budget, self._clock = changed_budget, clock
        self._lock = threading.Lock()
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._num_waiting = 0

    def terms(self, tenant: str) -> Allowance:
        """What holds for the next request."""
        with self._lock:
            state = self._state(tenant) if tenant in self._states else _State()
            if state.level == len(self._ratios) and self._clock() > state.closed_at + AGAIN_AFTER_S:
                self._set_level(state, len(self._ratios) - 1, "")
            is_allowed, note = state.level < len(self._ratios), state.note
            is_unjudged = state.num_answers >= MOST_UNJUDGED and len(state.kls) < NUM_TRIALS
            if is_allowed and is_unjudged and state.num_waiting:
                is_allowed, note = False, "moved text is not reused until its first audits are done"
            ratio = self._ratios[min(state.level, len(self._ratios) - 1)]
            return Allowance(is_allowed, ratio, note)

    def wants_audit(self, tenant: str) -> bool:
        """Count an output on moved K/V; whether to audit it.

        Each audit that is wanted must end in `record` or `abandon`.
        """
        with self._lock:
            state = self._state(tenant)
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
            state = self._state(tenant)
            self._end_wait(state)
            if state.level >= len(self._ratios) or ratio != self._ratios[state.level]:
                return  # the ratio was raised since
            state.num_audits += 1
            state.changed.append(top1 < 1.0)
            state.kls.append(kl)
            state.top1s.append(top1)
            if len(state.kls) < NUM_TRIALS:
                return
            mean = sum(state.kls) / len(state.kls)
            least, _ = interval(sum(state.changed), len(state.changed))
            if mean > self._budget_kl:
                found = f"a mean KL of {mean:.3f}; the budget is {self._budget_kl:.3f}"
                self._raise_level(tenant, state, found)
            elif least > self._changed_budget:
                found = f"{sum(state.changed)} of {len(state.changed)} outputs changed"
                found += f"; the budget is {self._changed_budget:.0%}"
                self._raise_level(tenant, state, found)

    def abandon(self, tenant: str) -> None:
        """An audit that was asked for will not come."""
        with self._lock:
            self._end_wait(self._state(tenant))

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
                    "changed": sum(state.changed) / len(state.changed) if state.changed else None,
                    "changed_interval": interval(sum(state.changed), len(state.changed)),
                    "note": state.note,
                }
                for tenant, state in self._states.items()
            }

    def _state(self, tenant: str) -> _State:
        state = self._states.setdefault(tenant, _State())
        self._states.move_to_end(tenant)
        if len(self._states) > MOST_REMEMBERED:
            self._states.popitem(last=False)
        return state

    def _end_wait(self, state: _State) -> None:
        self._num_waiting -= 1
        state.num_waiting = max(0, state.num_waiting - 1)  # the workload was forgotten meanwhile

    def _raise_level(self, tenant: str, state: _State, found: str) -> None:
        level = state.level + 1
        if level < len(self._ratios):
            note = f"repair ratio raised to {self._ratios[level]:.2f}: audits found {found}"
            self._set_level(state, level, note)
        else:
            state.level, state.closed_at = level, self._clock()
            state.note = f"moved text is no longer reused: audits found {found}"
        log.warning("tenant %r: %s", tenant, state.note)

    def _set_level(self, state: _State, level: int, note: str) -> None:
        """Begin the trials of a ratio."""
        state.level, state.num_answers, state.note = level, 0, note
        state.changed.clear()
        state.kls.clear()
        state.top1s.clear()


def interval(num_yes: int, num_all: int) -> tuple[float, float]:
    """Where a share lies with 95 % confidence, by Wilson's score."""
    z = 1.96
    if num_all == 0:
        return 0.0, 1.0
    if num_yes == 0:  # not a rounding error above it
        return 0.0, 1 - num_all / (num_all + z**2)
    share, scale = num_yes / num_all, 1 + z**2 / num_all
    middle = share + z**2 / (2 * num_all)
    reach = z * math.sqrt(share * (1 - share) / num_all + (z / (2 * num_all)) ** 2)
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)
