"""Reuse in the batch: shared rows, long answers, tenants; and always the right answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest

from batching import (
    ENDLESS,
    WAIT_S,
    alone,
    answers,
    check_stored_prefixes,
    engine_of,
    gate_of,
    greedy,
    mixed_prompts,
    running,
)
from fakes import words
from kvboost import KVBoost
from kvboost.core import MatchKind, Sampling, Span
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.warm import FEW_TOKENS, MANY_TOKENS
from waiting import wait_until

pytestmark = pytest.mark.tiny


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with engine_of(max_batch_size=8) as made:
        yield made


def test_requests_that_come_and_go_at_any_time_get_their_own_answers(engine: KVBoost) -> None:
    chance = random.Random(3)
    tickets, expected = [], []
    for number, prompt in enumerate(mixed_prompts(24, seed=5)):
        num_new = chance.choice([1, 2, 5, 12])
        tenant, reuse = chance.choice(["", "", "other"]), chance.choice(["exact", "exact", "off"])
        tickets.append(engine.submit(prompt, greedy(num_new), tenant=tenant, reuse=reuse))
        expected.append(alone(prompt, 12)[:num_new])
        if number % 4 == 0:
            time.sleep(chance.random() / 50)
    assert answers(tickets) == expected
    assert check_stored_prefixes(engine) > 0


def test_an_answer_ends_with_the_models_end_token(engine: KVBoost) -> None:
    prompt = words(33, seed=12)
    expected = alone(prompt, 30)
    last = expected[3]
    stop = expected.index(last)
    config = engine._parts.model.model.generation_config
    old, config.eos_token_id = config.eos_token_id, last
    try:
        tickets = [
            engine.submit(prompt, Sampling(max_new_tokens=30)),
            engine.submit(prompt, greedy(30)),
        ]
    finally:
        config.eos_token_id = old
    first, second = (ticket.result(WAIT_S) for ticket in tickets)
    assert (list(first.token_ids), first.finish_reason) == (expected[: stop + 1], "stop")
    assert first.text == "".join(f"{token} " for token in expected[:stop])
    assert (list(second.token_ids), second.finish_reason) == (expected, "length")


def test_a_stop_text_ends_one_answer_and_not_the_others(engine: KVBoost) -> None:
    prompt = words(40, seed=4)
    expected = alone(prompt, 12)
    stop = f"{expected[5]} {expected[6]}"
    tickets = [
        engine.submit(prompt, Sampling(max_new_tokens=12, ignore_eos=True, stop=(stop,))),
        engine.submit(prompt, greedy(12)),
    ]
    first, second = (ticket.result(WAIT_S) for ticket in tickets)
    assert first.finish_reason == "stop" and second.finish_reason == "length"
    whole = "".join(f"{token} " for token in expected)
    assert first.text == whole[: whole.index(stop)] and second.text == whole


def test_deltas_add_up_to_the_answer(engine: KVBoost) -> None:
    deltas: list = []
    sampling = Sampling(max_new_tokens=9, ignore_eos=True, top_logprobs=2)
    answer = engine.submit(words(30), sampling, listener=deltas.append).result(WAIT_S)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert tuple(t for delta in deltas for t in delta.token_ids) == answer.token_ids
    assert tuple(p for delta in deltas for p in delta.logprobs) == answer.logprobs
    assert [p.token for p in answer.logprobs] == list(answer.token_ids)
    assert all(p.top[0][0] == p.token and p.logprob == p.top[0][2] for p in answer.logprobs)
    assert list(answer.token_times) == sorted(answer.token_times)


def held_together(engine: KVBoost, prompts: list[list[int]], num_new: int) -> list[Ticket]:
    """Submitted while the model is held, so that they meet in the batch."""
    with gate_of(engine) as gate:
        gate.hold()
        tickets = [engine.submit(prompt, greedy(num_new)) for prompt in prompts]
        assert gate.is_reached.wait(WAIT_S)
        gate.open()
        for ticket in tickets:
            ticket.result(WAIT_S)
    return tickets


def test_a_common_beginning_is_computed_once_and_held_once() -> None:
    common = words(512, seed=21)
    prompts = [common + words(20, seed=number) for number in range(6)]
    with engine_of(max_batch_size=6) as engine, gate_of(engine) as gate:
        begun: set[int] = set()

        def hear(number: int) -> None:
            if number not in begun and len(begun) == 5:
                gate.hold()  # nobody has ended yet
            begun.add(number)

        tickets = [
            engine.submit(prompt, greedy(40), listener=lambda _, number=number: hear(number))
            for number, prompt in enumerate(prompts)
        ]
        wait_until(lambda: len(begun) == 6 and gate.is_reached.is_set())
        stats = engine.batch_stats()
        gate.open()
        assert answers(tickets) == [alone(prompt, 40) for prompt in prompts]
        exact = [ticket.result().reuse.tokens(MatchKind.EXACT) for ticket in tickets]
        assert exact[0] == 0 and min(exact[1:]) >= 496
        needed = (512 + 6 * 60) * engine._parts.model.geometry.bytes_per_token
        assert stats["num_running"] == 6 and needed < stats["kv_bytes"] < 1.3 * needed


def test_rows_that_are_ready_later_are_shared_too(engine: KVBoost) -> None:
    common = words(2048, seed=27)
    prompts = [common + words(9, seed=number) for number in range(3)]
    begun = threading.Event()
    with gate_of(engine) as gate:
        gate.hold()
        first = engine.submit([*common, 7], ENDLESS, listener=lambda _: begun.set())
        assert gate.is_reached.wait(WAIT_S)
        # Begins alike, with more of its own: does not wait for the rest of the first one.
        other = engine.submit(common[:1300] + words(2000, seed=3), ENDLESS)
        gate.open()
        assert begun.wait(WAIT_S)
        tickets = [engine.submit(prompt, greedy(5)) for prompt in prompts]
        assert answers(tickets) == [alone(prompt, 5) for prompt in prompts]
    assert [ticket.result().cached_tokens for ticket in tickets] == [2048] * 3
    for ticket in (first, other):
        ticket.cancel()


def test_a_later_one_shares_though_the_first_one_has_ended(engine: KVBoost) -> None:
    common = words(320, seed=23)
    begun = threading.Event()
    first = engine.submit([*common, 7], greedy(25), reuse="exact")
    second = engine.submit([*common, 8], ENDLESS, listener=lambda _: begun.set())
    assert begun.wait(WAIT_S)
    first.result(WAIT_S)
    before = engine.batch_stats()["kv_tokens"]
    event = threading.Event()
    third = engine.submit([*common, 9], ENDLESS, listener=lambda _: event.set())
    assert event.wait(WAIT_S)
    assert engine.batch_stats()["kv_tokens"] - before < 320
    fourth = engine.submit([*common, 9, 10], greedy(20))
    assert list(fourth.result(WAIT_S).token_ids) == alone([*common, 9, 10], 20)
    for ticket in (second, third):
        ticket.cancel()


def test_rows_are_shared_while_their_owner_still_computes_its_prompt(engine: KVBoost) -> None:
    common = words(1600, seed=24)
    longer, shorter = common + words(1500, seed=1), common[:1100] + words(1200, seed=2)
    with gate_of(engine) as gate:
        gate.hold()
        first = engine.submit(longer, greedy(5))
        assert gate.is_reached.wait(WAIT_S)
        second = engine.submit(shorter, greedy(5))
        gate.open()
        assert answers([first, second]) == [alone(longer, 5), alone(shorter, 5)]
    assert 992 <= second.result().cached_tokens <= 1100


def test_long_answers_on_shared_rows_outgrow_their_buffers(engine: KVBoost) -> None:
    common = words(140, seed=25)
    prompts = [common + words(5, seed=number) for number in range(3)]
    tickets = held_together(engine, prompts, 150)
    assert answers(tickets) == [alone(prompt, 150) for prompt in prompts]
    assert tickets[2].result().cached_tokens >= 128


def test_long_prompts_are_cut_while_others_decode(engine: KVBoost) -> None:
    heard: list[int] = []
    decoding = engine.submit(words(20), ENDLESS, listener=lambda _: heard.append(1))
    wait_until(lambda: len(heard) > 3)
    prompts = [words(900 + 300 * number, seed=50 + number) for number in range(3)]
    before = len(heard)
    tickets = [engine.submit(prompt, greedy(6)) for prompt in prompts]
    assert answers(tickets) == [alone(prompt, 6) for prompt in prompts]
    assert len(heard) - before > 6
    decoding.cancel()


def test_tenants_share_nothing(engine: KVBoost) -> None:
    prompt = words(400, seed=26)
    begun = threading.Event()
    first = engine.submit(prompt, ENDLESS, tenant="a", listener=lambda _: begun.set())
    assert begun.wait(WAIT_S)
    second = engine.submit(prompt, greedy(4), tenant="b").result(WAIT_S)
    third = engine.submit(prompt, greedy(4), tenant="a").result(WAIT_S)
    off = engine.submit(prompt, greedy(4), tenant="a", reuse="off").result(WAIT_S)
    assert [each.cached_tokens for each in (second, third, off)] == [0, 399, 0]
    first.cancel()


def test_a_few_more_rows_in_common_do_not_divide_those_who_share() -> None:
    common = words(256, seed=720)
    longer = common + words(64, seed=721)
    with engine_of(max_batch_size=4) as engine, gate_of(engine):
        tickets = []
        for prompt in ([*common, 7], [*longer, 8], [*longer, 9]):
            begun = threading.Event()
            tickets.append(engine.submit(prompt, ENDLESS, listener=lambda _, b=begun: b.set()))
            assert begun.wait(WAIT_S)
        rows = [member.rows.runs(Span(0, 256)) for member in engine._front._batch._running]
        assert len(rows) == 3 and rows[0] == rows[1] == rows[2]
        for ticket in tickets:
            ticket.cancel()


def test_other_calls_between_steps_change_no_answer(engine: KVBoost) -> None:
    prompts = mixed_prompts(6, seed=7)
    tickets = [engine.submit(prompt, greedy(40)) for prompt in prompts]
    for number in range(5):
        tokens = words(60, seed=70 + number)
        engine.warm(tokens)
        assert engine.generate(tokens, 5, eos_token_id=None).token_ids == alone(tokens, 5)
        assert engine.explain(tokens).tokens(MatchKind.EXACT) > 0
    assert answers(tickets) == [alone(prompt, 40) for prompt in prompts]


def test_running_answers_go_on_while_a_text_is_warmed(engine: KVBoost) -> None:
    text = words(10 * FEW_TOKENS, seed=710)
    sizes: list[int] = []
    hook = engine._parts.model.model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    ticket = running(engine)
    engine.warm(text)
    ticket.cancel()
    hook.remove()
    places = [place for place, size in enumerate(sizes) if size == FEW_TOKENS]
    between = [after - before - 1 for before, after in pairwise(places)]
    assert len(places) == 10 and min(between) >= 1
    assert engine.explain(text).tokens(MatchKind.EXACT) == len(text) - 1


def test_a_text_that_is_being_warmed_is_not_warmed_beside_it(engine: KVBoost) -> None:
    text = words(3 * MANY_TOKENS, seed=711)
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(lambda _: engine.warm(text), range(4))]
    assert sorted(result.num_computed for result in results) == [1, 1, 1, len(text)]


@contextmanager
def asked_all_the_time(engine: KVBoost, num_threads: int) -> Iterator[None]:
    """Short requests, one after the other on each thread, until the block ends."""
    stop = threading.Event()

    def ask(seed: int) -> None:
        while not stop.is_set():
            engine.submit(words(20, seed=seed), greedy(20)).result(WAIT_S)

    with ThreadPoolExecutor(num_threads) as threads:
        asking = [threads.submit(ask, seed) for seed in range(num_threads)]
        try:
            yield
        finally:
            stop.set()
    for each in asking:
        each.result()


def test_a_request_that_needs_much_room_is_not_overtaken_for_ever() -> None:
    with (
        engine_of(max_batch_size=4, num_blocks=20, block_size=10) as engine,
        asked_all_the_time(engine, num_threads=4),
    ):
        wait_until(lambda: engine.batch_stats()["num_running"] >= 3)
        large = engine.submit(words(150), greedy(40), reuse="off")
        assert list(large.result(60).token_ids) == alone(words(150), 40)


def test_rotation_that_depends_on_length_has_the_batch_for_itself_and_its_turn() -> None:
    long = words(1200, seed=31)
    with engine_of("phi3-longrope", max_batch_size=4) as engine:
        with asked_all_the_time(engine, num_threads=2):
            answer = engine.submit(long, greedy(5)).result(60)
        assert list(answer.token_ids) == alone(long, 5, "phi3-longrope")
        assert "beyond 1024 positions" in answer.reuse.note and answer.cached_tokens == 0
        short = engine.submit(words(20), greedy(10)).result(WAIT_S)
        assert list(short.token_ids) == alone(words(20), 10, "phi3-longrope")


def test_a_deterministic_engine_answers_bit_by_bit_as_unbatched() -> None:
    prompts = [words(100, seed=1), words(100, seed=1)[:90] + words(30, seed=2), words(7)]
    sampling = Sampling(max_new_tokens=6, ignore_eos=True, top_logprobs=5)
    with engine_of(deterministic=True, piece_tokens=32) as engine:
        expected = []
        for prompt in prompts:
            result = engine.generate(prompt, 6, reuse="off", output_logits=True, eos_token_id=None)
            rows = [row[0].float().log_softmax(-1).topk(5) for row in result.output.logits]
            expected.append(
                [list(zip(row.indices.tolist(), row.values.tolist(), strict=True)) for row in rows]
            )
        for _ in range(2):
            tickets = [engine.submit(prompt, sampling) for prompt in prompts]
            told = [
                [[(token, value) for token, _, value in each.top] for each in t.result(60).logprobs]
                for t in tickets
            ]
            assert told == expected
        assert [ticket.result().cached_tokens for ticket in tickets] == [96, 96, 0]


def test_fewer_bits_in_the_store_change_nothing_while_rows_are_shared() -> None:
    common = words(200, seed=41)
    prompts = [common + words(6, seed=number) for number in range(4)]
    with engine_of(kv_cache_bits=8) as engine:
        assert answers(held_together(engine, prompts, 6)) == [alone(p, 6) for p in prompts]
        engine.flush()
        again = [engine.submit(prompt, greedy(6)).result(WAIT_S) for prompt in prompts]
        assert all(each.cached_tokens >= 199 for each in again)
