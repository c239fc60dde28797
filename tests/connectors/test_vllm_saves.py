"""What the scheduler's side has saved, and when a request that has ended keeps its blocks."""

from __future__ import annotations

import pytest

from fake_vllm import (
    BLOCK_IDS,
    CHUNK_SIZE,
    MODEL,
    MOVED_AT,
    MOVED_STOP,
    PREFIX,
    FakeRequest,
    admit,
    admitted,
    all_saves,
    changes_of,
    knowing,
    moved_prompt,
    scheduler_side,
    whole_chunks,
)
from fakes import words
from kvboost.config import Options
from kvboost.connectors.vllm.messages import Facts, Save
from kvboost.reuse.lookup import LEAST_TOKENS
from kvboost.tiers.epochs import epoch_key


def test_a_prompt_is_saved_once_and_with_its_last_piece() -> None:
    side, request = admitted(scheduler_side(), words(100), cache_salt="b")
    assert side.step({"r": 60}, {"r": request}, ()).saves == []
    request.num_computed_tokens = 60
    assert side.step({"r": 39}, {"r": request}, ()).saves == []
    request.num_computed_tokens = 99
    saves = side.step({"r": 1}, {"r": request}, ()).saves
    assert saves == [Save("r", whole_chunks(words(100)), "b", BLOCK_IDS, is_last=False)]
    request.answer([7, 8])
    assert side.step({"r": 1}, {"r": request}, ()).saves == []


def test_steps_of_unknown_requests_save_nothing() -> None:
    side, request = scheduler_side(), FakeRequest("r", words(100))
    assert side.step({"r": 100}, {"r": request}, ()).saves == []
    side.add(request)
    assert side.step({"r": 100}, {}, ()).saves == []


def test_prompts_of_a_few_tokens_are_not_saved() -> None:
    side, request = admitted(scheduler_side(), words(LEAST_TOKENS - 1))
    assert side.step({"r": 15}, {"r": request}, ()).saves == []


def test_of_an_approximate_request_only_rows_before_moved_text_are_saved() -> None:
    options = Options(reuse="auto", chunk_size=CHUNK_SIZE, audit_ratio=0.0)
    side, request = admitted(knowing(options=options), moved_prompt())
    side.loaded(["r"])
    request.num_computed_tokens = MOVED_STOP
    (save,) = side.step({"r": 30}, {"r": request}, ()).saves
    assert save.tokens == whole_chunks(moved_prompt()[:MOVED_AT])
    request.num_computed_tokens = 242
    assert side.finish(request)[0]  # ended before it had an answer, so there is nothing to audit
    (save,) = all_saves(side)
    assert (save.tokens, save.is_last) == (moved_prompt()[:MOVED_AT], True)


def test_a_request_that_ends_saves_all_rows_but_that_of_its_last_token() -> None:
    side, request = admitted(scheduler_side(), words(100), cache_salt="b")
    request.answer([7, 8, 9])
    keeps_blocks, _ = side.finish(request)
    assert keeps_blocks
    assert all_saves(side) == [Save("r", [*words(100), 7, 8], "b", BLOCK_IDS, is_last=True)]
    assert side.finish(request) == (False, None)


def test_rows_that_steps_ahead_have_counted_are_not_saved() -> None:
    side, request = admitted(scheduler_side(), words(100))
    request.answer([7, 8, 9])
    request.num_computed_tokens = 105
    side.finish(request)
    assert all_saves(side)[0].tokens == [*words(100), 7, 8]


def test_a_request_that_ends_amid_its_prompt_saves_what_is_computed() -> None:
    side, request = admitted(scheduler_side(), words(100))
    request.num_computed_tokens = 40
    assert side.finish(request)[0]
    assert all_saves(side)[0].tokens == words(100)[:40]


def test_a_save_under_way_keeps_its_blocks_when_the_request_ends() -> None:
    side, request = admitted(scheduler_side(), words(CHUNK_SIZE))
    assert len(side.step({"r": CHUNK_SIZE}, {"r": request}, ()).saves) == 1
    request.num_computed_tokens = CHUNK_SIZE  # and no token was chosen yet
    assert side.finish(request)[0]
    assert [save.tokens for save in all_saves(side)] == [words(CHUNK_SIZE)]


def test_a_prompt_below_a_chunk_is_saved_with_its_answer() -> None:
    side, request = admitted(scheduler_side(), words(LEAST_TOKENS))
    assert side.step({"r": LEAST_TOKENS}, {"r": request}, ()).saves == []
    request.answer([7, 8])
    assert side.finish(request)[0]
    assert [save.tokens for save in all_saves(side)] == [[*words(LEAST_TOKENS), 7]]


@pytest.mark.parametrize("prompt", [PREFIX + words(50), moved_prompt()])
def test_a_request_that_ends_while_it_loads_keeps_nothing(prompt: list[int]) -> None:
    side, request = knowing(), FakeRequest("r", prompt)
    count, _ = admit(side, request)
    assert count
    request.num_computed_tokens = count  # as vLLM counts while it waits
    keeps_blocks, answer = side.finish(request)
    assert not keeps_blocks and answer is not None
    assert all_saves(side) == []


def test_a_request_that_ends_after_its_load_is_saved() -> None:
    side, request = admitted(knowing(), PREFIX + words(50))
    side.loaded(["unknown", "r"])
    request.num_computed_tokens = len(PREFIX)
    assert side.finish(request)[0]
    assert [save.tokens for save in all_saves(side)] == [PREFIX]


def test_rows_that_were_approximate_once_stay_so_for_a_request() -> None:
    side, request = admitted(knowing(), moved_prompt())
    side.step({}, {}, ["r"])
    assert side.match(request, 96) == (MOVED_STOP - 96, True)  # its own blocks, from vLLM
    side.allocated(request, MOVED_STOP - 96)
    side.loaded(["r"])
    request.num_computed_tokens = MOVED_STOP
    side.finish(request)
    assert all_saves(side)[0].tokens == moved_prompt()[:MOVED_AT]


def test_a_save_names_the_epoch_in_which_its_rows_were_computed() -> None:
    side, request = admitted(scheduler_side(), words(100), cache_salt="b")
    side._choice.epochs.learn(epoch_key("b"), 1)
    request.answer([7, 8, 9])
    side.finish(request)
    (save,) = all_saves(side)
    assert (save.tenant, save.epoch) == ("b", 0)


def test_rows_that_were_loaded_keep_their_epoch_when_vllm_allocates_again() -> None:
    side = scheduler_side()
    changes = tuple(changes_of(PREFIX, "b"))
    side.learn([Facts(MODEL, "", "", must_prefetch=False, changes=changes)])
    request = FakeRequest("r", PREFIX + words(50), cache_salt="b")
    assert admit(side, request) == (len(PREFIX), True)
    side.step({}, {}, ())
    side._choice.epochs.learn(epoch_key("b"), 1)
    side.loaded(["r"])
    request.num_computed_tokens = len(PREFIX)
    side.allocated(request, 0)
    request.answer([7, 8, 9])
    side.finish(request)
    assert [save.epoch for save in all_saves(side)] == [0]
