"""Moved text in the batch: repaired as it is alone, never shared nor stored as exact."""

from __future__ import annotations

import random

import pytest

from batching import (
    ENDLESS,
    WAIT_S,
    about,
    alone,
    answers,
    check_stored_prefixes,
    greedy,
    moving_engine,
)
from fakes import words
from kvboost.core import MatchKind
from waiting import wait_until

pytestmark = pytest.mark.tiny

ORDERS = [([3, 1], 1), ([2, 0], 2), ([1, 2], 3)]


@pytest.mark.parametrize("strategy", ["sampled", "selective", "cacheblend", "query", "none"])
def test_moved_text_in_a_batch_is_repaired_as_it_is_alone(strategy: str) -> None:
    with moving_engine(recompute_strategy=strategy) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        expected = [engine.generate(about(*each), 8, eos_token_id=None) for each in ORDERS]
    with moving_engine(recompute_strategy=strategy, batch_window_ms=300) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        tickets = [engine.submit(about(*each), greedy(8)) for each in ORDERS]
        assert answers(tickets) == [result.token_ids for result in expected]
        for ticket, result in zip(tickets, expected, strict=True):
            ours, theirs = ticket.result().reuse, result.reuse
            assert ours.tokens(MatchKind.MOVED) == theirs.tokens(MatchKind.MOVED) > 200
            assert ours.repaired_tokens == theirs.repaired_tokens
            assert (ours.repaired_tokens == 0) == (strategy == "none")
        engine.flush()
        assert engine.cache_stats()["audits"] == 3
        assert check_stored_prefixes(engine) > 0


def test_repaired_in_full_the_answer_is_a_full_one_though_pieces_are_cut() -> None:
    with moving_engine(recompute_ratio=1.0) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        heard: list[int] = []
        decoding = engine.submit(words(20), ENDLESS, listener=lambda _: heard.append(1))
        wait_until(lambda: len(heard) > 3)
        tickets = [engine.submit(about(*each), greedy(8)) for each in ORDERS]
        assert answers(tickets) == [alone(about(*each), 8) for each in ORDERS]
        assert all(t.result().reuse.tokens(MatchKind.MOVED) > 200 for t in tickets)
        decoding.cancel()


def test_approximations_are_never_shared_nor_stored_as_exact() -> None:
    """Every mode at once, alike beginnings, answers that are gone on with."""
    chance = random.Random(8)
    with moving_engine(max_chunks=80, recompute_strategy="none") as engine:
        last = tuple(engine.generate(about([0, 1, 2, 3], 0), 1).token_ids)
        for _ in range(4):
            tickets = []
            for number in range(6):
                order = chance.sample(range(4), chance.randint(1, 3))
                prompt, mode = about(order, number % 2), chance.choice(["off", "exact", "auto"])
                if number % 3 == 2:
                    prompt = [*prompt, *last, *words(6, 300)]
                tickets.append((prompt, mode, engine.submit(prompt, greedy(4), reuse=mode)))
            for prompt, mode, ticket in tickets:
                last = ticket.result(WAIT_S).token_ids
                if mode != "auto":
                    assert list(last) == alone(prompt, 4)
                    assert ticket.result().reuse.tokens(MatchKind.MOVED) == 0
            assert check_stored_prefixes(engine) > 0
