"""What the scheduler's side promises, to whom, and what it tells of it."""

from __future__ import annotations

import pytest

from fake_vllm import (
    BLOCK_IDS,
    BLOCK_SIZE,
    CHUNK_SIZE,
    DOCUMENT,
    ELSEWHERE,
    MODEL,
    MOVED_AT,
    MOVED_STOP,
    PREFIX,
    FakeRequest,
    admit,
    admitted,
    changes_of,
    knowing,
    moved_prompt,
    scheduler_side,
    whole_chunks,
)
from fakes import words
from kvboost.config import Options
from kvboost.connectors.vllm.messages import Change, Facts, Report
from kvboost.connectors.vllm.scheduler_side import SchedulerSide
from kvboost.core import MatchKind
from kvboost.reuse.lookup import LEAST_TOKENS


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
    side, request = admitted(knowing(), PREFIX + words(50))
    side.step({}, {}, ())
    side.loaded(["r"])
    assert side.match(request, 0) == (0, False)
    side.step({}, {}, ["another"])
    assert side.match(request, 0) == (0, False)


def test_a_request_that_was_preempted_is_loaded_again() -> None:
    side, request = admitted(knowing(), PREFIX + words(50))
    side.step({}, {}, ())
    side.loaded(["r"])
    side.step({}, {}, ["r", "unknown"])
    assert side.match(request, 0) == (len(PREFIX), True)


def test_a_load_is_handed_out_once() -> None:
    side, request = admitted(knowing(), PREFIX + words(50))
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
    assert admit(side, FakeRequest("moved", at_the_end)) == (len(at_the_end) - 1, True)


def test_so_few_tokens_that_they_do_not_pay_are_not_promised() -> None:
    side, request = knowing(), FakeRequest("r", PREFIX + words(50))
    side.add(request)
    num_local = len(PREFIX) - LEAST_TOKENS
    assert side.match(request, num_local) == (LEAST_TOKENS, True)
    assert side.match(request, num_local + 1) == (0, False)
    side.allocated(request, LEAST_TOKENS)
    assert side.step({}, {}, ()).loads == []  # the first promise is off


def test_another_tenant_finds_nothing() -> None:
    side = knowing()
    assert admit(side, FakeRequest("other", moved_prompt(), cache_salt="b")) == (0, False)
    assert admit(side, FakeRequest("same", moved_prompt())) == (MOVED_STOP, True)
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
    assert admit(knowing(), request) == (MOVED_STOP, True)
    exact = Options(reuse="exact", chunk_size=CHUNK_SIZE)
    assert admit(knowing(options=exact), request) == (len(PREFIX), True)
    off = Options(reuse="off", chunk_size=CHUNK_SIZE)
    assert admit(knowing(options=off), request) == (0, False)


def test_a_request_may_ask_for_more_than_the_options() -> None:
    side = knowing(options=Options(reuse="off", chunk_size=CHUNK_SIZE))
    request = FakeRequest("r", moved_prompt(), kv_transfer_params={"kvboost": {"reuse": "auto"}})
    assert admit(side, request) == (MOVED_STOP, True)


@pytest.mark.parametrize(
    "what", [{"lora_request": object()}, {"mm_features": ["image"]}, {"prompt_embeds": object()}]
)
def test_requests_that_are_more_than_text_are_left_alone(what: dict[str, object]) -> None:
    side, request = knowing(must_prefetch=True), FakeRequest("r", moved_prompt(), **what)  # type: ignore[arg-type]
    assert admit(side, request) == (0, False)
    work = side.step({"r": 242}, {"r": request}, ())
    assert not (work.prefetches or work.loads or work.saves)
    assert side.finish(request) == (False, None)


def test_a_worker_that_refuses_ends_all_reuse() -> None:
    side = scheduler_side()
    able = Facts(MODEL, "", "", must_prefetch=False, changes=tuple(changes_of(PREFIX)))
    side.learn([able, Facts(b"", "two shapes", "", must_prefetch=False, changes=())])
    assert admit(side, FakeRequest("r", moved_prompt())) == (0, False)
    side.learn([able, able])
    assert admit(side, FakeRequest("again", moved_prompt())) == (len(PREFIX), True)


def test_where_text_cannot_be_moved_exact_text_is_reused() -> None:
    side = knowing(move_refusal="the model is out of reach")
    assert admit(side, FakeRequest("r", moved_prompt())) == (len(PREFIX), True)


def test_a_request_waits_until_workers_have_prefetched_what_there_is() -> None:
    side, request = (
        scheduler_side(must_prefetch=True),
        FakeRequest("r", moved_prompt(), cache_salt="b"),
    )
    assert admit(side, request) == (None, False)
    (prefetch,) = side.step({}, {}, ()).prefetches
    assert (prefetch.request_id, prefetch.tokens) == ("r", moved_prompt())
    assert (prefetch.tenant, prefetch.reuse) == ("b", "auto")
    side.report(None)
    side.report(Report(prefetched=["another"]))
    assert side.match(request, 0) == (None, False)
    side.report(Report(changes=changes_of(PREFIX, "b"), prefetched=["r"]))
    assert side.match(request, 0) == (len(PREFIX), True)
    assert side.step({}, {}, ()).prefetches == []


def test_what_is_prefetched_for_a_request_that_is_gone_is_no_matter() -> None:
    side, request = admitted(scheduler_side(must_prefetch=True), words(100))
    assert side.finish(request)[0] is False
    side.report(Report(prefetched=["r"]))
    assert side.match(request, 0) == (0, False)


def test_moved_text_is_promised_with_what_is_computed_of_it() -> None:
    side, request = knowing(), FakeRequest("r", moved_prompt())
    assert admit(side, request, num_local=32) == (MOVED_STOP - 32, True)
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
    assert admit(side, request) == (255, True)
    assert request.block_hashes[0] == plain[0]
    assert request.block_hashes[1] != plain[1]


def test_who_may_not_read_cached_blocks_gets_none_and_is_saved() -> None:
    """As where log-probabilities of the prompt are asked for: all of it must be computed."""
    side = knowing()
    request = FakeRequest("r", moved_prompt(), skip_reading_prefix_cache=True)
    plain = list(request.block_hashes)
    assert admit(side, request) == (0, False)
    assert request.block_hashes == plain
    work = side.step({"r": 242}, {"r": request}, ())
    assert work.loads == []
    assert [save.tokens for save in work.saves] == [whole_chunks(moved_prompt())]


def test_a_promise_of_moved_text_that_is_not_kept_leaves_rows_exact() -> None:
    side, request = knowing(), FakeRequest("r", moved_prompt())
    side.add(request)
    assert side.match(request, 0) == (MOVED_STOP, True)
    side.allocated(request, 0)  # vLLM had no room for it
    (save,) = side.step({"r": 242}, {"r": request}, ()).saves
    assert save.tokens == whole_chunks(moved_prompt())
    request.answer([1, 2])
    _, answer = side.finish(request)
    assert answer is not None and answer["kvboost"]["provenance"] == "exact"


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
