"""The quality guard under any order of answers, audits and time: what always holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvboost.policy import guard as guards
from kvboost.policy.guard import (
    AGAIN_AFTER_S,
    MOST_UNJUDGED,
    MOST_WAITING,
    NUM_COUNTED,
    NUM_RECENT,
    NUM_TRIALS,
    QualityGuard,
    interval,
)

TENANTS = st.sampled_from(["a", "b", "c", "d"])
MOST_REMEMBERED = 3


def least_share(num_yes: int, num_all: int) -> float:
    """The smallest share that is within 1.96 standard deviations of what was seen."""
    shares = (place / 10_000 for place in range(10_001))
    far = 1.96**2
    return next(
        share
        for share in shares
        if num_all * (num_yes / num_all - share) ** 2 <= far * share * (1 - share) + 1e-12
    )


class Traffic(RuleBasedStateMachine):
    """Compares what the guard allows with a history that is kept by hand."""

    @initialize(
        budget=st.sampled_from([0.0, 0.05, 10.0]),
        changed=st.sampled_from([0.0, 0.3, 1.0]),
        ratios=st.sampled_from([(0.15,), (0.15, 0.3, 0.6)]),
        audited=st.sampled_from([0.0, 0.02, 1.0]),
    )
    def start(
        self, budget: float, changed: float, ratios: tuple[float, ...], audited: float
    ) -> None:
        self.now = 0.0
        self.budget, self.changed, self.ratios = budget, changed, ratios
        self.guard = QualityGuard(budget, ratios, audited, changed, clock=lambda: self.now)
        self.waiting: list[tuple[str, float]] = []
        self.history: dict[str, list[tuple[float, bool]]] = {}  # audits at the present ratio
        self.unaudited: dict[str, int] = {}
        self.num_asked: dict[str, int] = {}  # audits that have not come
        self.ratio: dict[str, float | None] = {}  # None: closed
        self.closed_at: dict[str, float] = {}
        self.known: list[str] = []

    @rule(tenant=TENANTS)
    def answer(self, tenant: str) -> None:
        allowed = self.guard.terms(tenant)
        self._look(tenant, allowed.allows_moved, allowed.ratio)
        if allowed.allows_moved:
            self._heard_of(tenant)
            self.unaudited[tenant] = self.unaudited.get(tenant, 0) + 1
            if self.guard.wants_audit(tenant):
                self.waiting.append((tenant, allowed.ratio))
                self.num_asked[tenant] = self.num_asked.get(tenant, 0) + 1

    @rule(kl=st.sampled_from([0.0, 0.04, 0.2, 20.0]), top1=st.sampled_from([0.5, 1.0]))
    def audit(self, kl: float, top1: float) -> None:
        if not self.waiting:
            return
        tenant, ratio = self.waiting.pop(0)
        self._heard_of(tenant)
        self.num_asked[tenant] = max(0, self.num_asked.get(tenant, 0) - 1)
        self.guard.record(tenant, ratio, kl, top1)
        if self.ratio.get(tenant, self.ratios[0]) != ratio:
            return
        seen = self.history.setdefault(tenant, [])
        seen.append((kl, top1 < 1))
        recent = [each for each, _ in seen[-NUM_RECENT:]]
        counted = [was for _, was in seen[-NUM_COUNTED:]]
        is_over = sum(recent) / len(recent) > self.budget
        is_over |= least_share(sum(counted), len(counted)) > self.changed
        if len(seen) >= NUM_TRIALS and is_over:
            place = self.ratios.index(ratio) + 1
            self.ratio[tenant] = self.ratios[place] if place < len(self.ratios) else None
            self.closed_at[tenant] = self.now
            if place < len(self.ratios):
                self._begin(tenant)

    @rule()
    def drop_an_audit(self) -> None:
        if self.waiting:
            tenant, _ = self.waiting.pop()
            self._heard_of(tenant)
            self.num_asked[tenant] = max(0, self.num_asked.get(tenant, 0) - 1)
            self.guard.abandon(tenant)

    @rule(seconds=st.sampled_from([1.0, AGAIN_AFTER_S / 2, AGAIN_AFTER_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_sane(self) -> None:
        if not hasattr(self, "guard"):
            return
        assert self.guard._num_waiting == len(self.waiting) <= MOST_WAITING
        states = self.guard.snapshot()
        assert set(states) == set(self.known) and len(states) <= MOST_REMEMBERED
        for state in self.guard._states.values():
            assert state.num_waiting >= 0
            low, high = interval(sum(state.changed), len(state.changed))
            assert 0 <= low <= high <= 1

    def _look(self, tenant: str, allows_moved: bool, ratio: float) -> None:
        """What is allowed is what the audits so far say."""
        wanted = self.ratio.get(tenant, self.ratios[0])
        if wanted is None and self.now > self.closed_at[tenant] + AGAIN_AFTER_S:
            wanted = self.ratio[tenant] = self.ratios[-1]
            self._begin(tenant)
        if tenant in self.known:
            self._heard_of(tenant)
        too_many = self.unaudited.get(tenant, 0) >= MOST_UNJUDGED
        is_judged = len(self.history.get(tenant, [])) >= NUM_TRIALS
        pauses = too_many and not is_judged and self.num_asked.get(tenant, 0) > 0
        assert allows_moved == (wanted is not None and not pauses)
        assert ratio == (self.ratios[-1] if wanted is None else wanted)

    def _begin(self, tenant: str) -> None:
        self.history[tenant], self.unaudited[tenant] = [], 0

    def _heard_of(self, tenant: str) -> None:
        if tenant in self.known:
            self.known.remove(tenant)
        self.known.append(tenant)
        if len(self.known) > MOST_REMEMBERED:
            gone = self.known.pop(0)
            for each in (
                self.history,
                self.unaudited,
                self.num_asked,
                self.ratio,
                self.closed_at,
            ):
                each.pop(gone, None)


@pytest.fixture(autouse=True)
def few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST_REMEMBERED", MOST_REMEMBERED)


def test_what_is_allowed_follows_from_the_audits() -> None:
    Traffic.TestCase.settings = settings(max_examples=80, stateful_step_count=200, deadline=None)
    Traffic.TestCase().runTest()


@pytest.mark.parametrize(
    ("num_yes", "num_all", "low", "high"),
    [
        (0, 0, 0, 1),
        (0, 10, 0, 0.278),
        (5, 10, 0.237, 0.763),
        (2, 4, 0.150, 0.850),
        (4, 4, 0.510, 1),
    ],
)
def test_intervals_are_those_of_the_textbook(
    num_yes: int, num_all: int, low: float, high: float
) -> None:
    found = interval(num_yes, num_all)
    assert all(math.isclose(a, b, abs_tol=5e-4) for a, b in zip(found, (low, high), strict=True))


def test_nothing_changed_is_never_over_a_budget_of_nothing() -> None:
    assert all(interval(0, num_all)[0] == 0.0 for num_all in range(1, 500))


def test_audits_that_never_come_do_not_take_moved_text_away() -> None:
    guard = QualityGuard(0.05, (0.15,), audit_ratio=0.02)
    for _ in range(3 * MOST_UNJUDGED):
        assert guard.terms("a").allows_moved
        if guard.wants_audit("a"):
            guard.abandon("a")
    assert guard.wants_audit("a")  # the trials are still wanted
    assert not guard.terms("a").allows_moved
    guard.abandon("a")
    assert guard.terms("a").allows_moved


def test_recent_audits_count() -> None:
    guard = QualityGuard(10.0, (0.15,), audit_ratio=1.0, changed_budget=0.3)
    for number in range(2000):
        if not guard.terms("a").allows_moved:
            break
        assert guard.wants_audit("a")
        guard.record("a", 0.15, 0.01, top1=1.0 if number < 1000 else 0.9)
    assert 1000 < number < 1000 + NUM_COUNTED


def test_too_many_changed_outputs_raise_the_ratio_and_say_why() -> None:
    guard = QualityGuard(10.0, (0.15, 0.3), audit_ratio=1.0, changed_budget=0.05)
    for top1 in (1.0, 0.9, 1.0, 0.9):
        assert guard.terms("a").ratio == 0.15 and guard.wants_audit("a")
        guard.record("a", 0.15, 0.01, top1)
    assert guard.terms("a").ratio == 0.3
    assert "2 of 4 outputs changed; the budget is 5%" in guard.terms("a").note
