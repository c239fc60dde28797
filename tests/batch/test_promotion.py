"""After an answer on moved text its context becomes exact, in idle time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batching import WAIT_S, about, alone, check_stored_prefixes, greedy, moving_engine
from fakes import words
from kvboost import KVBoost
from kvboost.core import MatchKind
from kvboost.engine.batch import promotion
from kvboost.engine.prefill import Terms, look_up
from kvboost.models.rows import Rows

pytestmark = pytest.mark.tiny

NEXT = words(9, 400)


def moved(engine: KVBoost, prompt: list[int]) -> list[int]:
    """Ask on moved text; prompt and output."""
    result = engine.submit(prompt, greedy(8)).result(WAIT_S)
    assert result.reuse.tokens(MatchKind.MOVED) > 200
    return [*prompt, *result.token_ids]


@pytest.mark.parametrize("is_audited", [False, True])
def test_the_next_question_is_exact(is_audited: bool) -> None:
    with moving_engine() as engine:
        if not is_audited:
            engine._parts.guard.wants_audit = lambda _: False
        engine.generate(about([0, 1, 2, 3], 0), 1)
        context = moved(engine, about([3, 1], 1))
        engine.flush()
        assert engine.cache_stats()["audits"] == is_audited
        assert engine.cache_stats()["promoted_tokens"] > 200
        assert check_stored_prefixes(engine) > 0
        follow_up = engine.submit([*context, *NEXT], greedy(8)).result(WAIT_S)
        assert follow_up.reuse.tokens(MatchKind.EXACT) == len(context) - 1
        assert follow_up.reuse.tokens(MatchKind.MOVED) == 0
        assert list(follow_up.token_ids) == alone([*context, *NEXT], 8)


def test_documents_asked_for_together_are_read_together() -> None:
    """In another order they are moved from the promoted context, where nothing else was read."""
    with moving_engine() as engine:
        engine.generate(about([0, 2], 0), 1)
        engine.generate(about([3, 1], 1), 1)
        together, parts = about([1, 0], 2), engine._parts
        parts = replace(parts, options=replace(parts.options, company="same"))
        before = look_up(together, parts, Terms("auto"))
        moved(engine, about([0, 1], 2))
        engine.flush()
        after = look_up(together, parts, Terms("auto"))
    assert len(before.moved) == 0
    assert sum(len(run) for run in after.moved) > 200


def test_it_can_be_switched_off() -> None:
    with moving_engine(promote=False) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        context = moved(engine, about([3, 1], 1))
        engine.flush()
        assert engine.cache_stats()["promoted_tokens"] == 0
        assert engine.cache_stats()["audits"] == 1
        follow_up = engine.submit([*context, *NEXT], greedy(1)).result(WAIT_S)
        assert follow_up.reuse.tokens(MatchKind.MOVED) > 200


def test_exact_and_computed_answers_leave_nothing_to_do() -> None:
    with moving_engine() as engine:
        for reuse in ("exact", "auto", "off"):
            engine.submit(about([0, 1], 0), greedy(4), reuse=reuse).result(WAIT_S)
        engine.flush()
        assert engine.cache_stats()["promoted_tokens"] == 0


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_deleted_meanwhile_is_not_stored_again(everything: bool) -> None:
    with moving_engine() as engine:
        first = about([0, 1, 2, 3], 0)
        engine.generate(first, 1)
        context = moved(engine, about([3, 1], 1))
        engine.contents.delete(None if everything else first, tenant="")
        engine.flush()
        assert engine.cache_stats()["promoted_tokens"] == 0
        assert engine.explain([*context, *NEXT]).tokens(MatchKind.EXACT) == 0


def test_a_deletion_between_two_steps_wins() -> None:
    with moving_engine() as engine:
        engine._parts.guard.wants_audit = lambda _: False
        first = about([0, 1, 2, 3], 0)
        engine.generate(first, 1)
        context = moved(engine, about([3, 1], 1))
        engine._worker.call(lambda: next(engine._worker._idle[0]))
        assert engine.cache_stats()["promoted_tokens"] > 0
        engine.contents.delete(first, tenant="")
        engine.contents.delete(context, tenant="")
        engine.flush()
        assert engine.explain([*context, *NEXT]).tokens(MatchKind.EXACT) == 0


def test_between_two_steps_no_rows_are_held() -> None:
    with moving_engine() as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        moved(engine, about([3, 1], 1))  # audited, so promoted and then compared
        for _ in range(4):
            engine._worker.call(lambda: next(engine._worker._idle[0], None))
            assert engine.batch_stats()["kv_bytes"] == 0


def test_without_room_in_the_pool_nothing_is_promoted_or_audited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory outside the pool would be beyond every budget."""

    outside: list[int] = []

    def refuse(num_tokens: int) -> Rows:
        outside.append(num_tokens)
        raise AssertionError(f"{num_tokens} rows outside the pool")

    with moving_engine() as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        moved(engine, about([3, 1], 1))
        pool = engine._parts.pool

        def take_all() -> Rows:
            pool.evict(pool.num_blocks * pool.block_bytes)
            return Rows(pool, pool.num_free * pool.block_size)

        held = engine._worker.call(take_all)  # once all that the answer computed is stored
        monkeypatch.setattr(engine._parts.model, "fresh_rows", refuse)
        engine.flush()
        assert engine.cache_stats()["promoted_tokens"] == engine.cache_stats()["audits"] == 0
        assert engine._parts.guard._num_waiting == 0 and not outside
        held.release()


def test_a_question_that_comes_at_once_is_promoted_as_well() -> None:
    with moving_engine() as engine:
        engine._parts.guard.wants_audit = lambda _: False
        engine.generate(about([0, 1, 2, 3], 0), 1)
        context = moved(engine, about([3, 1], 1))
        context = moved(engine, [*context, *NEXT])
        engine.flush()
        report = engine.explain([*context, *words(5, 401)])
        assert report.tokens(MatchKind.EXACT) == len(context) - 1


def test_of_many_contexts_the_newest_are_promoted() -> None:
    with moving_engine(max_batch_size=1) as engine:
        engine._parts.guard.wants_audit = lambda _: False
        engine.generate(about([0, 1, 2, 3], 0), 1)
        orders = [[3, 1], [2, 0], [1, 2], [3, 0], [2, 1], [0, 3]]
        contexts = [about(order, 10 + n) for n, order in enumerate(orders)]
        tickets = [engine.submit(each, greedy(2)) for each in contexts]
        for ticket in tickets:
            ticket.result(WAIT_S)
        engine.flush()
        exact = [engine.explain(each).tokens(MatchKind.EXACT) for each in contexts]
        is_promoted = [num > 200 for num in exact]
        assert is_promoted == [False] * 2 + [True] * promotion.MOST_WAITING


def test_whatever_is_asked_between_only_exact_text_is_stored_as_exact() -> None:
    chance = random.Random(3)
    with moving_engine(max_chunks=60, recompute_strategy="none") as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        context: list[int] = []
        for number in range(12):
            order = chance.sample(range(4), chance.randint(1, 3))
            prompt = [*context, *NEXT] if context and number % 3 == 2 else about(order, number % 3)
            result = engine.submit(prompt, greedy(4)).result(WAIT_S)
            context = [*prompt, *result.token_ids]
            if chance.random() < 0.5:
                engine.flush()
            if chance.random() < 0.2:
                engine.contents.delete(about(order, 0), tenant="")
            assert check_stored_prefixes(engine) > 0
