"""What the scheduler's side promises, to whom, and what it has saved."""

from __future__ import annotations

import pytest

from fake_vllm import (
    BLOCK_IDS,
    BLOCK_SIZE,
    CHUNK_SIZE,
    MODEL,
    FakeRequest,
    admit,
    changes_of,
    scheduler_side,
)
from fakes import words
from kvboost.config import Options
from kvboost.connectors.vllm.messages import Change, Facts, Report, Save
from kvboost.connectors.vllm.scheduler_side import SchedulerSide
from kvboost.core import MatchKind
from kvboost.reuse.lookup import LEAST_TOKENS

PREFIX = words(64, seed=1)
DOCUMENT = words(128, seed=2)
ELSEWHERE = words(40, seed=3) + DOCUMENT + words(24, seed=4)  # where the document was read before
MOVED_AT = len(PREFIX) + 20
MOVED_STOP = MOVED_AT + len(DOCUMENT)


def moved_prompt(seed: int = 5) -> list[int]:
    """An exact prefix, 20 tokens, the document and a question."""
    return PREFIX + words(20, seed) + DOCUMENT + words(30, seed + 1)


def knowing(**how: object) -> SchedulerSide:
    return scheduler_side(PREFIX, ELSEWHERE, **how)  # type: ignore[arg-type]


def all_saves(side: SchedulerSide) -> list[Save]:
    return side.step({}, {}, ()).saves


def test_where_nothing_is_known_nothing_is_promised() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100))
    assert admit(side, request) == (0, False)
    assert side.step({}, {}, ()).loads == []


def test_before_workers_have_spoken_nothing_is_promised_or_saved() -> None:
    options = Options(chunk_size=CHUNK_SIZE)
    side = SchedulerSide(options, {}, lambda _: BLOCK_IDS, BLOCK_SIZE)
    request = FakeRequest("r", words(100))
    assert admit(side, request) == (0, False)
    assert side.step({"r": 100}, {"r": request}, ()).saves == []


@pytest.mark.parametrize("num_local", [0, 16, 48])
def test_an_exact_prefix_is_promised_without_what_vllm_has(num_local: int) -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    assert admit(side, request, num_local) == (len(PREFIX) - num_local, True)
    (load,) = side.step({}, {}, ()).loads
    assert (load.request_id, load.start, load.stop) == ("r", num_local, len(PREFIX))
    assert (load.block_ids, load.tokens) == (BLOCK_IDS, request.all_token_ids)
    assert load.is_exact and not load.repaired
    spans = [match.span for match in load.plan.matches]
    assert (spans[0].start, spans[-1].stop) == (num_local, len(PREFIX))


def test_what_could_not_be_loaded_is_not_promised_again() -> None:
    """VLLM asks again when the first block of a load has failed: it must compute then."""
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    admit(side, request)
    side.step({}, {}, ())
    side.loaded(["r"])
    assert side.match(request, 0) == (0, False)
    side.step({}, {}, ["another"])
    assert side.match(request, 0) == (0, False)


def test_a_request_that_was_preempted_is_loaded_again() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    admit(side, request)
    side.step({}, {}, ())
    side.loaded(["r"])
    side.step({}, {}, ["r", "unknown"])
    assert side.match(request, 0) == (len(PREFIX), True)


def test_a_load_is_handed_out_once() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    admit(side, request)
    side.allocated(request, len(PREFIX))
    assert len(side.step({}, {}, ()).loads) == 1
    assert side.step({}, {}, ()).loads == []


def test_what_vllm_gives_no_blocks_for_is_not_loaded() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    side.add(request)
    side.match(request, 0)
    side.allocated(request, 0)
    assert side.step({}, {}, ()).loads == []


def test_the_last_token_is_never_promised() -> None:
    side = knowing()
    assert admit(side, FakeRequest("exact", PREFIX)) == (len(PREFIX) - 1, True)
    at_the_end = words(20, seed=9) + DOCUMENT
    assert admit(side, FakeRequest("moved", at_the_end)) == (len(at_the_end) - 1, False)


def test_so_few_tokens_that_they_do_not_pay_are_not_promised() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    side.add(request)
    num_local = len(PREFIX) - LEAST_TOKENS
    assert side.match(request, num_local) == (LEAST_TOKENS, True)
    assert side.match(request, num_local + 1) == (0, False)
    side.allocated(request, LEAST_TOKENS)
    assert side.step({}, {}, ()).loads == []  # the first promise is off


def test_rows_that_were_approximate_once_stay_so_for_a_request() -> None:
    side, request = knowing(), FakeRequest("r", moved_prompt())
    admit(side, request)
    side.step({}, {}, ["r"])
    assert side.match(request, 96) == (MOVED_STOP - 96, False)  # its own blocks, from vLLM
    side.allocated(request, MOVED_STOP - 96)
    request.num_computed_tokens = MOVED_STOP
    side.finish(request)
    assert all_saves(side)[0].tokens == moved_prompt()[:MOVED_AT]


def test_another_tenant_finds_nothing() -> None:
    side = knowing()
    assert admit(side, FakeRequest("other", moved_prompt(), cache_salt="b")) == (0, False)
    assert admit(side, FakeRequest("same", moved_prompt())) == (MOVED_STOP, False)
    side.report(Report(changes=changes_of(PREFIX, "b")))
    assert admit(side, FakeRequest("b", moved_prompt(), cache_salt="b")) == (len(PREFIX), True)


@pytest.mark.parametrize(
    "asked",
    [{"reuse": "off"}, {"reuze": "exact"}, {"reuse": "much"}, {"reuse": ["auto"]},
     {"chunk_size": 8}, "auto", ["reuse"], [], None, 3],
)  # fmt: skip
def test_a_request_that_wants_nothing_or_is_wrong_gets_nothing(asked: object) -> None:
    side = knowing()
    request = FakeRequest("r", moved_prompt(), kv_transfer_params={"kvboost": asked})
    assert admit(side, request) == (0, False)
    assert side.step({"r": 242}, {"r": request}, ()).saves == []
    assert side.finish(request) == (False, None)


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"kvboost": {}}])
def test_a_request_that_says_nothing_gets_what_the_options_say(params: object) -> None:
    request = FakeRequest("r", moved_prompt(), kv_transfer_params=params)
    assert admit(knowing(), request) == (MOVED_STOP, False)
    exact = Options(reuse="exact", chunk_size=CHUNK_SIZE)
    assert admit(knowing(options=exact), request) == (len(PREFIX), True)
    off = Options(reuse="off", chunk_size=CHUNK_SIZE)
    assert admit(knowing(options=off), request) == (0, False)


def test_a_request_may_ask_for_more_than_the_options() -> None:
    side = knowing(options=Options(reuse="off", chunk_size=CHUNK_SIZE))
    request = FakeRequest("r", moved_prompt(), kv_transfer_params={"kvboost": {"reuse": "auto"}})
    assert admit(side, request) == (MOVED_STOP, False)


@pytest.mark.parametrize(
    "what", [{"lora_request": object()}, {"mm_features": ["image"]}, {"prompt_embeds": object()}]
)
def test_requests_that_are_more_than_text_are_left_alone(what: dict[str, object]) -> None:
    side, request = knowing(must_bring=True), FakeRequest("r", moved_prompt(), **what)  # type: ignore[arg-type]
    assert admit(side, request) == (0, False)
    work = side.step({"r": 242}, {"r": request}, ())
    assert not (work.brings or work.loads or work.saves)
    assert side.finish(request) == (False, None)


def test_a_worker_that_refuses_ends_all_reuse() -> None:
    side = scheduler_side()
    able = Facts(MODEL, "", "", must_bring=False, changes=tuple(changes_of(PREFIX)))
    side.learn([able, Facts(b"", "two shapes", "", must_bring=False, changes=())])
    assert admit(side, FakeRequest("r", moved_prompt())) == (0, False)
    side.learn([able, able])
    assert admit(side, FakeRequest("again", moved_prompt())) == (len(PREFIX), True)


def test_where_text_cannot_be_moved_exact_text_is_reused() -> None:
    side = knowing(move_refusal="the model is out of reach")
    assert admit(side, FakeRequest("r", moved_prompt())) == (len(PREFIX), True)


def test_a_request_waits_until_workers_have_brought_what_there_is() -> None:
    side, request = (
        scheduler_side(must_bring=True),
        FakeRequest("r", moved_prompt(), cache_salt="b"),
    )
    assert admit(side, request) == (None, False)
    (bring,) = side.step({}, {}, ()).brings
    assert (bring.request_id, bring.tokens) == ("r", moved_prompt())
    assert (bring.tenant, bring.reuse) == ("b", "auto")
    side.report(None)
    side.report(Report(brought=["another"]))
    assert side.match(request, 0) == (None, False)
    side.report(Report(changes=changes_of(PREFIX, "b"), brought=["r"]))
    assert side.match(request, 0) == (len(PREFIX), True)
    assert side.step({}, {}, ()).brings == []


def test_what_is_brought_for_a_request_that_is_gone_is_no_matter() -> None:
    side, request = scheduler_side(must_bring=True), FakeRequest("r", words(100))
    admit(side, request)
    assert side.finish(request)[0] is False
    side.report(Report(brought=["r"]))
    assert side.match(request, 0) == (0, False)


def test_moved_text_is_loaded_within_the_step() -> None:
    side, request = knowing(), FakeRequest("r", moved_prompt())
    assert admit(side, request, num_local=32) == (MOVED_STOP - 32, False)
    (load,) = side.step({}, {}, ()).loads
    (moved,) = load.plan.moved
    assert not load.is_exact
    assert (moved.start, moved.stop) == (MOVED_AT, MOVED_STOP)
    assert (load.start, load.stop, load.ratio) == (32, MOVED_STOP, 0.15)
    assert 10 <= len(load.repaired) <= 30
    assert all(MOVED_AT <= position < MOVED_STOP for position in load.repaired)
    exact = [match for match in load.plan.matches if match.kind is MatchKind.EXACT]
    assert (exact[0].span.start, exact[-1].span.stop) == (32, len(PREFIX))


def test_blocks_with_anything_approximate_have_hashes_of_their_own() -> None:
    side, plain = knowing(), FakeRequest("", moved_prompt()).block_hashes
    hashes = []
    for name in ("one", "two"):
        request = FakeRequest(name, moved_prompt())
        admit(side, request)
        hashes.append(request.block_hashes)
    first = MOVED_AT // BLOCK_SIZE
    assert MOVED_AT % BLOCK_SIZE  # the first block is approximate in part
    assert len(plain) == len(hashes[0]) == len(hashes[1])
    for each in hashes:
        assert each[:first] == plain[:first]
        assert not set(each[first:]) & set(plain)
    assert not set(hashes[0][first:]) & set(hashes[1][first:])


@pytest.mark.parametrize("num_tokens", [218, 219, 255])
def test_moved_text_whose_block_has_no_hash_yet_is_left_out(num_tokens: int) -> None:
    """Its block could not be set apart: vLLM hashes it when the answer has filled it."""
    side = scheduler_side(PREFIX, DOCUMENT, hash_block_size=128)
    fresh = words(70, seed=5)  # up to position 134, in the second block
    prompt = [*PREFIX, *fresh, *DOCUMENT, *words(30, seed=6)]
    request = FakeRequest("part", prompt[:num_tokens], hash_block_size=128)
    assert admit(side, request) == (len(PREFIX), True)
    request = FakeRequest("whole", prompt[:256], hash_block_size=128)
    plain = list(request.block_hashes)
    assert admit(side, request) == (255, False)
    assert request.block_hashes[0] == plain[0]
    assert request.block_hashes[1] != plain[1]


def test_exact_text_leaves_hashes_alone() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    plain = list(request.block_hashes)
    admit(side, request)
    assert request.block_hashes == plain


def test_what_has_left_the_workers_is_not_promised() -> None:
    side = knowing()
    side.report(Report(changes=[Change(changes_of(PREFIX)[1].key)]))
    assert admit(side, FakeRequest("r", PREFIX + words(50))) == (CHUNK_SIZE, True)
    side.report(Report(changes=[Change(change.key) for change in changes_of(ELSEWHERE)]))
    assert admit(side, FakeRequest("moved", words(20) + DOCUMENT + words(9))) == (0, False)


def test_a_prompt_is_saved_once_and_with_its_last_piece() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100), cache_salt="b")
    admit(side, request)
    assert side.step({"r": 60}, {"r": request}, ()).saves == []
    request.num_computed_tokens = 60
    assert side.step({"r": 39}, {"r": request}, ()).saves == []
    request.num_computed_tokens = 99
    saves = side.step({"r": 1}, {"r": request}, ()).saves
    assert saves == [Save("r", words(100), "b", BLOCK_IDS, is_last=False)]
    request.answer([7, 8])
    assert side.step({"r": 1}, {"r": request}, ()).saves == []


def test_steps_of_unknown_requests_save_nothing() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100))
    assert side.step({"r": 100}, {"r": request}, ()).saves == []
    side.add(request)
    assert side.step({"r": 100}, {}, ()).saves == []


def test_prompts_of_a_few_tokens_are_not_saved() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(LEAST_TOKENS - 1))
    admit(side, request)
    assert side.step({"r": 15}, {"r": request}, ()).saves == []


def test_of_an_approximate_request_only_rows_before_moved_text_are_saved() -> None:
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.0)
    side, request = knowing(options=options), FakeRequest("r", moved_prompt())
    admit(side, request)
    request.num_computed_tokens = MOVED_STOP
    (save,) = side.step({"r": 30}, {"r": request}, ()).saves
    assert save.tokens == moved_prompt()[:MOVED_AT]
    request.num_computed_tokens = 242
    assert side.finish(request)[0]  # ended before it had an answer, so there is nothing to audit
    (save,) = all_saves(side)
    assert (save.tokens, save.is_last) == (moved_prompt()[:MOVED_AT], True)


def test_a_request_that_ends_saves_all_rows_but_that_of_its_last_token() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100), cache_salt="b")
    admit(side, request)
    request.answer([7, 8, 9])
    keeps_blocks, _ = side.finish(request)
    assert keeps_blocks
    assert all_saves(side) == [Save("r", [*words(100), 7, 8], "b", BLOCK_IDS, is_last=True)]
    assert side.finish(request) == (False, None)


def test_rows_that_steps_ahead_have_counted_are_not_saved() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100))
    admit(side, request)
    request.answer([7, 8, 9])
    request.num_computed_tokens = 105
    side.finish(request)
    assert all_saves(side)[0].tokens == [*words(100), 7, 8]


def test_a_request_that_ends_amid_its_prompt_saves_what_is_computed() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100))
    admit(side, request)
    request.num_computed_tokens = 40
    assert side.finish(request)[0]
    assert all_saves(side)[0].tokens == words(100)[:40]


def test_a_save_under_way_keeps_its_blocks_when_the_request_ends() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(LEAST_TOKENS))
    admit(side, request)
    assert len(side.step({"r": LEAST_TOKENS}, {"r": request}, ()).saves) == 1
    request.num_computed_tokens = LEAST_TOKENS  # and no token was chosen yet
    assert side.finish(request)[0]
    assert [save.tokens for save in all_saves(side)] == [words(LEAST_TOKENS)]


def test_a_request_that_ends_while_it_loads_keeps_nothing() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    admit(side, request)
    request.num_computed_tokens = len(PREFIX)  # as vLLM counts while it waits
    keeps_blocks, answer = side.finish(request)
    assert not keeps_blocks and answer is not None
    assert all_saves(side) == []


def test_a_request_that_ends_after_its_load_is_saved() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    admit(side, request)
    side.loaded(["unknown", "r"])
    request.num_computed_tokens = len(PREFIX)
    assert side.finish(request)[0]
    assert [save.tokens for save in all_saves(side)] == [PREFIX]


def test_a_step_tells_who_was_preempted_and_whether_it_is_idle() -> None:
    side = scheduler_side()
    busy = side.step({"r": 3}, {}, iter(["a", "b"]))
    assert (busy.preempted, busy.is_idle) == ({"a", "b"}, False)
    idle = side.step({}, {}, ())
    assert (idle.preempted, idle.is_idle) == (set(), True)


def test_an_answer_says_what_was_reused() -> None:
    side = knowing()
    exact, moved = FakeRequest("e", PREFIX + words(50)), FakeRequest("m", moved_prompt())
    admit(side, exact)
    admit(side, moved)
    num_repaired = len(side.step({}, {}, ()).loads[1].repaired)
    assert side.finish(exact)[1] == {
        "kvboost": {
            "provenance": "exact",
            "exact_tokens": len(PREFIX),
            "moved_tokens": 0,
            "repaired_tokens": 0,
        }
    }
    assert side.finish(moved)[1] == {
        "kvboost": {
            "provenance": "approximate",
            "exact_tokens": len(PREFIX),
            "moved_tokens": len(DOCUMENT),
            "repaired_tokens": num_repaired,
        }
    }
    assert side.counts == {
        "requests": 2,
        "prompt_tokens": len(PREFIX) + 50 + len(moved_prompt()),
        "exact_tokens": 2 * len(PREFIX),
        "moved_tokens": len(DOCUMENT),
        "repaired_tokens": num_repaired,
    }
