import logging

import pytest

from kvboost.policy.guard import AGAIN_AFTER_S, MOST_UNJUDGED, NUM_TRIALS, QualityGuard


def answers_until_exact(guard: QualityGuard, kl: float, most: int = 1000) -> int | None:
    """Answers on moved text that a workload of this KL gets before it is taken away."""
    for count in range(most):
        terms = guard.terms("tenant")
        if not terms.allows_moved:
            return count
        if guard.wants_audit("tenant"):
            guard.record("tenant", terms.ratio, kl, top1=0.5)
    return None


def test_a_bad_workload_falls_back_to_exact_after_a_known_number_of_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = QualityGuard(budget_kl=0.05, ratios=(0.1, 0.2, 0.4), audit_ratio=0.0)
    with caplog.at_level(logging.WARNING):
        assert answers_until_exact(guard, kl=0.3) == 3 * NUM_TRIALS
    assert [record.message for record in caplog.records if "raised to 0.20" in record.message]
    assert "no longer reused" in guard.terms("tenant").note
    assert guard.snapshot()["tenant"]["moved_allowed"] is False
    assert guard.terms("another").allows_moved


def test_a_good_workload_is_left_alone() -> None:
    guard = QualityGuard(budget_kl=0.05, ratios=(0.1, 0.2), audit_ratio=0.1)
    assert answers_until_exact(guard, kl=0.04) is None
    assert guard.terms("tenant").ratio == 0.1
    assert guard.terms("tenant").note == ""


def test_a_workload_that_becomes_bad_is_noticed_by_the_sampled_audits() -> None:
    guard = QualityGuard(budget_kl=0.05, ratios=(0.1,), audit_ratio=0.1)
    answers_until_exact(guard, kl=0.01, most=50)
    assert answers_until_exact(guard, kl=0.5) is not None


def test_after_the_trials_a_share_is_audited() -> None:
    guard = QualityGuard(budget_kl=1.0, ratios=(0.1,), audit_ratio=0.02)
    audited = []
    for _ in range(1000):
        audited.append(guard.wants_audit("tenant"))
        if audited[-1]:
            guard.record("tenant", 0.1, 0.0, 1.0)
    assert audited[:NUM_TRIALS] == [True] * NUM_TRIALS
    assert sum(audited[NUM_TRIALS:]) == 20


def test_an_audit_of_an_earlier_ratio_does_not_count() -> None:
    guard = QualityGuard(budget_kl=0.05, ratios=(0.1, 0.2), audit_ratio=1.0)
    for _ in range(2 * NUM_TRIALS):
        assert guard.wants_audit("tenant")
    for _ in range(2 * NUM_TRIALS):
        guard.record("tenant", 0.1, 1.0, 0.0)
    assert guard.terms("tenant").ratio == 0.2


def test_without_idle_time_moved_text_waits_for_its_first_audits() -> None:
    guard = QualityGuard(budget_kl=0.05, ratios=(0.1,), audit_ratio=0.0)
    wanted = sum(guard.wants_audit("tenant") for _ in range(MOST_UNJUDGED))
    assert wanted == NUM_TRIALS  # not more than are needed
    assert not guard.terms("tenant").allows_moved
    assert "until its first audits" in guard.terms("tenant").note
    for _ in range(NUM_TRIALS):
        guard.record("tenant", 0.1, 0.01, 1.0)
    assert guard.terms("tenant").allows_moved


def test_an_abandoned_audit_is_asked_for_again() -> None:
    guard = QualityGuard(budget_kl=0.05, ratios=(0.1,), audit_ratio=0.0)
    for _ in range(NUM_TRIALS):
        assert guard.wants_audit("tenant")
    assert not guard.wants_audit("tenant")
    guard.abandon("tenant")
    assert guard.wants_audit("tenant")


def test_a_workload_that_was_bad_is_tried_again_after_an_hour() -> None:
    now = [0.0]
    guard = QualityGuard(0.05, (0.1, 0.2), audit_ratio=0.0, clock=lambda: now[0])
    assert answers_until_exact(guard, kl=0.3) == 2 * NUM_TRIALS
    now[0] = AGAIN_AFTER_S + 1
    assert guard.terms("tenant").ratio == 0.2  # the strongest
    assert answers_until_exact(guard, kl=0.3) == NUM_TRIALS
    now[0] *= 2.1
    assert answers_until_exact(guard, kl=0.01) is None


def test_past_workloads_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.policy.guard.MOST_REMEMBERED", 10)
    guard = QualityGuard(0.05, (0.1,), audit_ratio=0.0)
    for number in range(100):
        assert guard.wants_audit(str(number)) == (number < 8)  # audits that may wait
    assert list(guard.snapshot()) == [str(number) for number in range(90, 100)]
    for number in range(8):
        guard.abandon(str(number))
    assert guard.wants_audit("new")
