"""What a request computed before it left is reused by the next one with the same prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest

from batching import ENDLESS, WAIT_S, alone, check_stored_prefixes, engine_of, greedy
from fakes import words
from kvboost import KVBoost
from kvboost.core import MatchKind, Sampling
from kvboost.engine.batch.pace import MOST_TOKENS
from kvboost.errors import DeadlineExceeded

pytestmark = pytest.mark.tiny

PROMPT = words(4 * MOST_TOKENS, seed=1)


def left_in_forward(
    engine: KVBoost, number: int, leave: Callable[[], None], prompt: list[int], **arguments: Any
) -> BaseException:
    """Submit, and call `leave` in the forward of that number; how the request ended."""
    count = 0

    def watch(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            leave()

    hook = engine._parts.model.model.register_forward_pre_hook(watch)
    try:
        tickets.append(engine.submit(prompt, Sampling(max_new_tokens=4), **arguments))
        error = tickets[-1].future.exception(WAIT_S)
        engine.flush()
    finally:
        hook.remove()
    assert error is not None and count == number
    return error


tickets: list[Any] = []


def cancel() -> None:
    tickets[-1].cancel()


def test_half_a_prefill_that_was_cancelled_is_reused() -> None:
    with engine_of() as engine:
        error = left_in_forward(engine, 2, cancel, PROMPT)
        assert isinstance(error, CancelledError)
        again = engine.submit(PROMPT, greedy(4)).result(WAIT_S)
        assert 0.9 * 2 * MOST_TOKENS <= again.cached_tokens <= 2 * MOST_TOKENS
        assert list(again.token_ids) == alone(PROMPT, 4)
        assert check_stored_prefixes(engine) > 0


def test_a_late_request_gets_further_with_every_retry() -> None:
    with engine_of() as engine:
        for turn in range(3):
            error = left_in_forward(engine, 1, lambda: time.sleep(0.6), PROMPT, deadline_s=0.5)
            assert isinstance(error, DeadlineExceeded)
            known = engine.explain(PROMPT).tokens(MatchKind.EXACT)
            assert known >= 0.9 * (turn + 1) * MOST_TOKENS


def test_an_output_that_was_cancelled_is_kept_with_its_prompt() -> None:
    with engine_of() as engine:
        heard: list[int] = []
        prompt = words(100, seed=2)
        ticket = engine.submit(
            prompt, ENDLESS, listener=lambda delta: heard.extend(delta.token_ids)
        )
        while len(heard) < 60:
            time.sleep(0.001)
        ticket.cancel()
        assert isinstance(ticket.future.exception(WAIT_S), CancelledError)
        whole = [*prompt, *heard[:60]]
        again = engine.submit(whole, greedy(4)).result(WAIT_S)
        assert again.cached_tokens >= 0.9 * len(whole)
        assert list(again.token_ids) == alone(whole, 4)


def test_nothing_is_kept_of_a_request_without_reuse() -> None:
    with engine_of() as engine:
        left_in_forward(engine, 2, cancel, PROMPT, reuse="off")
        assert engine.cache_stats()["hot_chunks"] == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_moved_text_of_a_cancelled_prefill_is_not_stored_as_exact(number: int) -> None:
    document = words(900, seed=3)
    options = {"chunk_size": 32, "reuse": "auto", "quality_budget": 100.0}
    with engine_of(**options) as engine:
        engine._parts.cost.pays = lambda *_: True
        engine.generate(words(40, seed=4) + document, 1)
        prompt = words(300, seed=5) + document + words(3 * MOST_TOKENS, seed=6)
        left_in_forward(engine, number, cancel, prompt)
        assert check_stored_prefixes(engine, most=8) > 0
        plan = engine.explain(prompt)
        assert plan.tokens(MatchKind.EXACT) >= 0.9 * 300
        # What was computed on top of the moved text is found as approximate, if at all.
        assert plan.tokens(MatchKind.EXACT) <= 300
        if number == 3:
            assert plan.tokens(MatchKind.MOVED) >= 900 + MOST_TOKENS
