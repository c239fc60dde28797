"""When the scheduler's side uses moved text: what audits found, and whether it pays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fake_vllm import BLOCK_IDS, CHUNK_SIZE, FakeRequest, admit, changes_of, scheduler_side
from fakes import words
from kvboost.config import Options
from kvboost.connectors.vllm import choice as module
from kvboost.connectors.vllm import scheduler_side as scheduler_module
from kvboost.connectors.vllm.choice import EVERYBODY
from kvboost.connectors.vllm.messages import Audit, Load, Report, Verdict
from kvboost.connectors.vllm.scheduler_side import (
    AUDIT_PATIENCE_S,
    LONGEST_AUDIT,
    MOST_AUDITED,
    PROMOTION_PAUSE_S,
    SchedulerSide,
)
from kvboost.policy.cost import Work
from kvboost.policy.guard import NUM_TRIALS

DOCUMENT = words(128, seed=2)
ELSEWHERE = words(40, seed=3) + DOCUMENT
MOVED_AT = 20
PROMPT = words(MOVED_AT, seed=5) + DOCUMENT + words(30, seed=6)
PROMISED = MOVED_AT + len(DOCUMENT)


def answered(
    side: SchedulerSide,
    name: str,
    num_answered: int = 3,
    prompt: list[int] = PROMPT,
    tenant: str | None = None,
) -> tuple[bool, list[Audit]]:
    """A request on moved text that has ended: whether it keeps its blocks, and its audits."""
    request = FakeRequest(name, prompt, cache_salt=tenant)
    assert admit(side, request)[1]
    side.step({}, {}, ())
    side.loaded([name])
    request.answer(range(num_answered))
    keeps_blocks, _ = side.finish(request)
    return keeps_blocks, side.step({}, {}, ()).audits


def test_an_answer_on_moved_text_is_audited() -> None:
    side = scheduler_side(ELSEWHERE)
    keeps_blocks, (audit,) = answered(side, "r")
    assert keeps_blocks
    assert audit == Audit("r", [*PROMPT, 0, 1, 2], len(PROMPT), MOVED_AT, "", BLOCK_IDS)
    side.report(Report(verdicts=[Verdict("r", 0.01, 1.0)]))
    assert side.counts["audits"] == 1
    assert side.guard.snapshot()[EVERYBODY]["mean_kl"] == 0.01


def test_of_a_long_answer_the_beginning_is_audited() -> None:
    _, (audit,) = answered(scheduler_side(ELSEWHERE), "r", num_answered=100)
    assert len(audit.tokens) == len(PROMPT) + MOST_AUDITED


@pytest.mark.parametrize("promotes", [True, False])
def test_answers_that_are_not_audited_are_promoted(promotes: bool) -> None:
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.0, promote=promotes)
    side = scheduler_side(ELSEWHERE, options=options)
    for number in range(NUM_TRIALS):
        assert answered(side, f"trial {number}")[1]
        side.report(Report(verdicts=[Verdict(f"trial {number}", 0.01, 1.0)]))
    audits = answered(side, "r")[1]
    assert [audit.request_id for audit in audits] == ["r"] * promotes
    side.report(Report(verdicts=[Verdict("r", 9.0, 0.0)]))
    assert side.counts["audits"] == NUM_TRIALS
    assert side.guard.snapshot()[EVERYBODY]["mean_kl"] == pytest.approx(0.01)
    assert side.guard.terms(EVERYBODY).ratio == 0.15


def test_a_verdict_counts_once_and_only_for_what_was_asked() -> None:
    side = scheduler_side(ELSEWHERE)
    answered(side, "r")
    verdict = Verdict("r", 0.01, 1.0)
    side.report(Report(verdicts=[Verdict("unknown", 9.0), verdict, verdict]))
    assert side.counts["audits"] == 1


def test_one_audit_at_a_time_keeps_blocks_for_it() -> None:
    side = scheduler_side(ELSEWHERE)
    answered(side, "one")
    keeps_blocks, audits = answered(side, "two")
    assert keeps_blocks  # for its save
    assert audits == []
    side.report(Report(verdicts=[Verdict("one", 0.0, 1.0)]))
    assert len(answered(side, "three")[1]) == 1


def test_a_request_too_long_to_hold_its_blocks_is_not_audited() -> None:
    side = scheduler_side(ELSEWHERE)
    long = [*PROMPT, *words(LONGEST_AUDIT, seed=8)]
    assert answered(side, "r", prompt=long)[1] == []
    assert len(answered(side, "short")[1]) == 1  # nobody waits for the long one


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def other(side: SchedulerSide) -> dict[str, FakeRequest]:
    """A request with text of its own, which waits to be scheduled."""
    request = FakeRequest("other", words(50, seed=9))
    side.add(request)
    return {"other": request}


def test_an_audit_may_go_on_while_nobody_waits(now: list[float]) -> None:
    side = scheduler_side(ELSEWHERE)
    answered(side, "r")
    now[0] += 10 * AUDIT_PATIENCE_S
    work = side.step({}, {}, ())
    assert work.is_quiet and not work.ends_audits


def test_an_audit_that_holds_blocks_for_long_is_ended_on_all_ranks_in_one_step(
    now: list[float],
) -> None:
    side = scheduler_side(ELSEWHERE)
    requests = other(side)
    for number in range(2):
        answered(side, f"r{number}")
        now[0] += AUDIT_PATIENCE_S
        assert not side.step({"other": 1}, requests, ()).ends_audits
        now[0] += 1.0
        assert side.step({"other": 1}, requests, ()).ends_audits
        side.report(Report(verdicts=[Verdict(f"r{number}")]))
        assert not side.step({"other": 1}, requests, ()).ends_audits


def test_an_audit_ends_for_requests_that_lack_blocks() -> None:
    side = scheduler_side(ELSEWHERE)
    answered(side, "r")
    requests = other(side)
    work = side.step({"other": 1}, requests, ())
    assert not work.is_quiet and not work.ends_audits
    assert side.step({"other": 1}, requests, ("other",)).ends_audits
    assert side.step({}, requests, ()).ends_audits  # it finds no room


def test_an_audit_goes_on_later_if_a_request_only_waits_for_its_load() -> None:
    side = scheduler_side(ELSEWHERE)
    answered(side, "r")
    loading = FakeRequest("loading", [*ELSEWHERE, 1, 2])
    admit(side, loading)
    work = side.step({}, {"loading": loading}, ())
    assert work.loads and not work.is_quiet and not work.ends_audits


def promoting(side: SchedulerSide) -> None:
    """Until trials are over, and answers are promoted without an audit."""
    for number in range(NUM_TRIALS):
        answered(side, f"trial {number}")
        side.report(Report(verdicts=[Verdict(f"trial {number}", 0.01, 1.0)]))


def test_an_audit_that_is_due_takes_the_verdict_of_a_promotion() -> None:
    """Promotions would take its place otherwise."""
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.5)
    side = scheduler_side(ELSEWHERE, options=options)
    promoting(side)
    assert side.counts["audits"] == NUM_TRIALS
    assert answered(side, "promoted")[1]
    assert answered(side, "due")[1] == []
    side.report(Report(verdicts=[Verdict("promoted", 0.02, 1.0)]))
    assert side.counts["audits"] == NUM_TRIALS + 1


def test_what_is_exact_already_is_not_promoted() -> None:
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.0)
    side = scheduler_side(ELSEWHERE, options=options)
    promoting(side)
    request = FakeRequest("r", PROMPT)
    admit(side, request)
    side.loaded(["r"])
    side.report(Report(changes=changes_of(PROMPT)))  # another request's
    request.answer([1, 2])
    side.finish(request)
    assert side.step({}, {}, ()).audits == []


def test_a_prompt_too_long_to_be_promoted_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes milliseconds of the scheduler's time."""
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.0)
    side = scheduler_side(ELSEWHERE, options=options)
    promoting(side)
    request = FakeRequest("r", [*PROMPT, *words(LONGEST_AUDIT, seed=8)])
    admit(side, request)
    side.loaded(["r"])
    request.answer([1, 2])
    monkeypatch.delattr(module.Choice, "read")
    side.finish(request)
    assert side.step({}, {}, ()).audits == []


def test_promotions_pause_after_one_that_was_given_up(now: list[float]) -> None:
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.0)
    side = scheduler_side(ELSEWHERE, options=options)
    promoting(side)
    assert answered(side, "one")[1]
    side.report(Report(verdicts=[Verdict("one")]))
    assert answered(side, "two")[1] == []
    now[0] += PROMOTION_PAUSE_S
    assert answered(side, "three")[1]


def test_exact_answers_and_those_that_were_not_given_are_not_audited() -> None:
    side, exact = scheduler_side(ELSEWHERE), FakeRequest("e", ELSEWHERE + words(20))
    admit(side, exact)
    side.loaded(["e"])
    exact.answer([1, 2])
    side.finish(exact)
    cut_short = FakeRequest("c", PROMPT)
    admit(side, cut_short)
    side.loaded(["c"])
    cut_short.num_computed_tokens = len(PROMPT)
    side.finish(cut_short)
    work = side.step({}, {}, ())
    assert work.audits == []
    assert [save.request_id for save in work.saves] == ["e", "c"]


def test_an_audit_that_did_not_end_is_asked_for_again() -> None:
    side = scheduler_side(ELSEWHERE)
    for number in range(3 * NUM_TRIALS):
        assert len(answered(side, f"r{number}")[1]) == 1
        side.report(Report(verdicts=[Verdict(f"r{number}")]))
    assert side.counts["audits"] == 0
    assert side.guard.terms(EVERYBODY).allows_moved


def test_answers_beyond_the_budget_raise_the_ratio_and_then_end_moved_text() -> None:
    side, ratios = scheduler_side(ELSEWHERE), []
    for number in range(3 * NUM_TRIALS):
        ratios.append(side.guard.terms(EVERYBODY).ratio)
        assert len(answered(side, f"r{number}")[1]) == 1
        side.report(Report(verdicts=[Verdict(f"r{number}", 1.0, 0.5)]))
    assert ratios == [0.15] * NUM_TRIALS + [0.3] * NUM_TRIALS + [0.6] * NUM_TRIALS
    assert admit(side, FakeRequest("r", PROMPT)) == (0, False)


def test_answers_are_judged_together_whatever_salt_they_have() -> None:
    """Clients make salts up: with a state for each, none would ever be found out."""
    side = scheduler_side()
    for number in range(3 * NUM_TRIALS):
        salt = f"salt {number}"
        side.report(Report(changes=changes_of(ELSEWHERE, salt)))
        assert len(answered(side, f"r{number}", tenant=salt)[1]) == 1
        side.report(Report(verdicts=[Verdict(f"r{number}", 1.0, 0.5)]))
    side.report(Report(changes=changes_of(ELSEWHERE, "new")))
    assert admit(side, FakeRequest("r", PROMPT, cache_salt="new")) == (0, False)


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def run(side: SchedulerSide, clock: Clock, counts: dict[str, int], num_computed: int,
        seconds: float) -> None:  # fmt: skip
    """One step, from its start to its report; requests have `num_computed` tokens already."""
    options = {"kvboost": {"reuse": "exact"}}
    requests = {
        name: FakeRequest(name, words(num_computed + count, seed=7), num_computed, None, options)
        for name, count in counts.items()
    }
    for request in requests.values():
        side.add(request)
    side.step(counts, requests, ())
    clock.now += seconds
    side.report(None)


LONG = [*words(1500, seed=9), *DOCUMENT, *words(30, seed=6)]  # mostly computed either way


def taught(clock: Clock, **others: int) -> SchedulerSide:
    """A side that has seen prefill at an even pace, and slow steps on top of placed rows."""
    side = scheduler_side(ELSEWHERE)
    for count in (200, 600, 1000) * 3:
        run(side, clock, {"r": count, **others}, 0, 1e-3 * count)
        run(side, clock, {"r": count, **others}, 1000, 1e-2 * count)
    return side


def test_moved_text_is_used_until_it_is_known_not_to_pay(clock: Clock) -> None:
    assert admit(scheduler_side(ELSEWHERE), FakeRequest("x", LONG))[0] == 1500 + len(DOCUMENT)
    assert admit(taught(clock), FakeRequest("x", LONG)) == (0, False)


def test_steps_of_several_requests_teach_nothing(clock: Clock) -> None:
    side = taught(clock, another=1)
    assert admit(side, FakeRequest("x", LONG))[0] == 1500 + len(DOCUMENT)


def test_only_a_step_that_ends_a_prompt_teaches(clock: Clock) -> None:
    side, request = scheduler_side(), FakeRequest("r", words(40))
    side.add(request)
    for num_computed, count in ((0, 20), (20, 20), (40, 1)):
        request.num_computed_tokens = num_computed
        side.step({"r": count}, {"r": request}, ())
        clock.now += 0.5
        side.report(None)
    assert list(side._choice.cost._seen) == [(Work.of(40, 20, 20), 0.5)]


def test_steps_that_overlap_teach_nothing(clock: Clock) -> None:
    side = scheduler_side(ELSEWHERE)
    side.step({}, {}, ())  # is never reported before the next one begins
    for count in (200, 600, 1000) * 3:
        run(side, clock, {"r": count}, 1000, 1e-2 * count)
        side.step({}, {}, ())
    assert admit(side, FakeRequest("x", LONG))[0] == 1500 + len(DOCUMENT)


def test_moved_text_that_pays_is_used(clock: Clock) -> None:
    side = scheduler_side(ELSEWHERE)
    for count in (200, 600, 1000) * 3:
        run(side, clock, {"r": count}, 0, 1e-3 * count)
        run(side, clock, {"r": count}, 1000, 1e-3 * count)
    assert admit(side, FakeRequest("x", PROMPT)) == (PROMISED, True)
    assert admit(side, FakeRequest("y", LONG)) == (0, False)  # it would win less than a fifth


def with_moved_text(side: SchedulerSide, clock: Clock, stop: int = PROMISED) -> Load:
    """A request on moved text, loaded up to `stop` in three seconds."""
    request = FakeRequest("r", PROMPT)
    admit(side, request)
    (load,) = side.step({}, {}, ()).loads
    clock.now += 9.0
    side.report(Report(repairs_s={"r": 3.0, "gone": 5.0}))
    side.loaded(["r"])
    request.num_computed_tokens = stop
    side.step({"r": len(PROMPT) - stop}, {"r": request}, ())
    clock.now += 2.0
    side.report(None)
    return load


def test_a_step_on_moved_text_is_counted_with_what_its_load_computed(clock: Clock) -> None:
    side = scheduler_side(ELSEWHERE)
    load = with_moved_text(side, clock)
    ((work, seconds),) = side._choice.cost._seen
    assert work.num_rows == MOVED_AT + 30 + len(load.repaired)
    assert (work.num_placed, seconds) == (len(DOCUMENT), 5.0)


@pytest.mark.parametrize("stop", [0, PROMISED - 16, PROMISED + 10])
def test_a_step_that_does_not_go_on_from_moved_text_is_counted_alone(
    clock: Clock, stop: int
) -> None:
    """As when the load failed, or when the rest of the prompt takes several steps."""
    side = scheduler_side(ELSEWHERE)
    with_moved_text(side, clock, stop)
    assert list(side._choice.cost._seen) == [(Work.of(len(PROMPT), len(PROMPT) - stop, stop), 2.0)]


def test_an_option_of_no_repair_is_taken() -> None:
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, recompute_strategy="none")
    side = scheduler_side(ELSEWHERE, options=options)
    admit(side, FakeRequest("r", PROMPT))
    assert side.step({}, {}, ()).loads[0].repaired == []
