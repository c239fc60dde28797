"""The batch when requests are cancelled, late, too many or broken: nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from batching import ENDLESS, WAIT_S, alone, come_to_rest, engine_of, gate_of, greedy
from fakes import WordTokenizer, words
from kvboost import ConfigError, KVBoost, KVBoostError
from kvboost.core import Sampling
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.results import Delta
from kvboost.errors import DeadlineExceeded, QueueFull, UnsupportedModel
from kvboost.models.slots import SlotCache
from tiny_models import REFUSED, build

pytestmark = pytest.mark.tiny

NUM_PLACES = 5


class SpoiltTokenizer(WordTokenizer):
    """Raises for one word."""

    def decode(self, tokens: list[int], **settings: Any) -> str:
        if 3 in tokens:
            raise ValueError("a word that cannot be read")
        return super().decode(tokens, **settings)


@pytest.fixture(scope="module")
def made() -> Iterator[KVBoost]:
    with engine_of(max_batch_size=2, max_queue_size=3) as engine:
        engine._front._tokenizer = SpoiltTokenizer()
        yield engine


@pytest.fixture
def engine(made: KVBoost) -> Iterator[KVBoost]:
    """An engine that, whatever a test did to it, has all its places again and answers well."""
    yield made
    come_to_rest(made)
    prompts = [words(20 + number, seed=number) for number in range(NUM_PLACES)]
    tickets = [made.submit(prompt, greedy(3)) for prompt in prompts]
    assert [list(each.result(WAIT_S).token_ids) for each in tickets] == [
        alone(prompt, 3) for prompt in prompts
    ]
    assert made.batch_stats()["kv_bytes"] == 0 and len(made._front._batch._live) == 0


def running(engine: KVBoost, seed: int = 0, **arguments: Any) -> Ticket:
    """A request that decodes without end."""
    begun = threading.Event()
    ticket = engine.submit(
        words(30, seed=seed), ENDLESS, listener=lambda _: begun.set(), **arguments
    )
    assert begun.wait(WAIT_S)
    return ticket


def test_a_waiting_request_can_be_cancelled(engine: KVBoost) -> None:
    first, second = running(engine), running(engine, 1)
    heard: list[Delta] = []
    waiting = engine.submit(words(30, seed=2), greedy(3), listener=heard.append)
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    assert not heard and not first.future.done()
    for ticket in (first, second):
        ticket.cancel()


def test_a_request_can_be_cancelled_while_its_prompt_is_computed(engine: KVBoost) -> None:
    heard: list[Delta] = []
    with gate_of(engine) as gate:
        gate.hold()
        ticket = engine.submit(words(2500), greedy(3), listener=heard.append)
        assert gate.is_reached.wait(WAIT_S)
        ticket.cancel()
        gate.open()
        with pytest.raises(CancelledError):
            ticket.result(WAIT_S)
    assert not heard


def test_a_request_can_be_cancelled_while_it_decodes(engine: KVBoost) -> None:
    other, ticket = running(engine), running(engine, 1)
    ticket.cancel()
    with pytest.raises(CancelledError):
        ticket.result(WAIT_S)
    assert not other.future.done()
    other.cancel()


def test_cancelling_the_future_itself_harms_nobody(engine: KVBoost) -> None:
    ticket = running(engine)
    other = engine.submit(words(40), greedy(30))
    assert not ticket.future.cancel()
    assert list(other.result(WAIT_S).token_ids) == alone(words(40), 30)
    with pytest.raises(CancelledError):
        ticket.result(WAIT_S)
    assert not other.future.cancel() and other.result().token_ids


def test_a_task_of_asyncio_that_is_cancelled_stops_its_request(engine: KVBoost) -> None:
    ticket = running(engine)

    async def wait_a_moment() -> None:
        await asyncio.wait_for(asyncio.wrap_future(ticket.future), 0.05)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(wait_a_moment())
    with pytest.raises(CancelledError):
        ticket.result(WAIT_S)


def test_cancelling_late_or_twice_changes_nothing(engine: KVBoost) -> None:
    ticket = engine.submit(words(20), greedy(2))
    answer = ticket.result(WAIT_S)
    ticket.cancel()
    ticket.cancel()
    assert ticket.result() is answer


def test_a_deadline_holds_while_waiting(engine: KVBoost) -> None:
    blockers = [running(engine), running(engine, 1)]
    waiting = engine.submit(words(30, seed=2), greedy(3), deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match="not done after"):
        waiting.result(WAIT_S)
    for ticket in blockers:
        ticket.cancel()


def test_a_deadline_holds_while_a_prompt_is_computed(engine: KVBoost) -> None:
    with gate_of(engine) as gate:
        gate.hold()
        ticket = engine.submit(words(2500), greedy(3), deadline_s=0.05)
        assert gate.is_reached.wait(WAIT_S)
        time.sleep(0.06)
        gate.open()
        with pytest.raises(DeadlineExceeded):
            ticket.result(WAIT_S)


def test_a_deadline_holds_while_decoding(engine: KVBoost) -> None:
    heard: list[Delta] = []
    ticket = engine.submit(words(30), ENDLESS, deadline_s=0.5, listener=heard.append)
    with pytest.raises(DeadlineExceeded):
        ticket.result(WAIT_S)
    assert heard


def test_a_deadline_that_is_over_is_over(engine: KVBoost) -> None:
    with pytest.raises(DeadlineExceeded):
        engine.submit(words(30), greedy(3), deadline_s=0.0).result(WAIT_S)


def test_a_full_queue_says_so_and_takes_requests_again_later(engine: KVBoost) -> None:
    blockers = [running(engine, seed) for seed in range(2)]
    waiting = [engine.submit(words(20, seed=seed), greedy(2)) for seed in range(3)]
    for _ in range(20):
        with pytest.raises(QueueFull, match="3 requests wait already"):
            engine.submit(words(20), greedy(2))
    waiting[1].cancel()
    with pytest.raises(CancelledError):
        waiting[1].result(WAIT_S)
    extra = engine.submit(words(25), greedy(2))
    for ticket in blockers:
        ticket.cancel()
    for ticket in (waiting[0], waiting[2], extra):
        assert len(ticket.result(WAIT_S).token_ids) == 2


def test_who_has_an_answer_finds_a_place_for_the_next_question(engine: KVBoost) -> None:
    refused: list[BaseException] = []

    def ask(seed: int) -> None:
        try:
            for _ in range(20):
                engine.submit(words(20, seed=seed), greedy(1)).result(WAIT_S)
        except BaseException as error:
            refused.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(NUM_PLACES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == []


def test_requests_that_would_break_a_step_are_refused_before(engine: KVBoost) -> None:
    other = running(engine)
    for prompt in ([512], [5, -1], [10**12]):
        with pytest.raises(ConfigError, match="the model knows 0 to 511"):
            engine.submit(prompt, greedy(2))
    with pytest.raises(ConfigError, match="token 512"):
        engine.submit(words(20), Sampling(logit_bias={512: 1.0}))
    with pytest.raises(ConfigError, match="does not fit"):
        engine.submit(words(20), Sampling(max_new_tokens=10**9))
    assert not other.future.done()
    other.cancel()


class Broken:
    """A grammar that fails at its second token, in one of its methods."""

    def __init__(self, method: str) -> None:
        self._method, self._num_accepted = method, 0

    @property
    def is_over(self) -> bool:
        self._fail("is_over")
        return False

    def restrict(self, logits: torch.Tensor) -> None:
        self._fail("restrict")

    def accept(self, token: int) -> None:
        self._num_accepted += 1
        self._fail("accept")

    def _fail(self, method: str) -> None:
        if method == self._method and self._num_accepted:
            raise RuntimeError("broken grammar")


def deaf(_: Delta) -> None:
    raise RuntimeError("nobody listens")


def leaving(_: Delta) -> None:
    raise SystemExit("nobody listens")


@pytest.mark.parametrize(
    ("sampling", "listener", "message"),
    [
        (greedy(5), deaf, "nobody listens"),
        (greedy(5), leaving, "nobody listens"),
        (Sampling(max_new_tokens=5, logit_bias={3: 1000.0}), None, "cannot be read"),
        *[
            (Sampling(max_new_tokens=5, ignore_eos=True, grammar=Broken(method)), None, "grammar")
            for method in ("restrict", "accept", "is_over")
        ],
    ],
)
def test_a_broken_request_ends_alone(
    engine: KVBoost, sampling: Sampling, listener: Any, message: str
) -> None:
    with gate_of(engine) as gate:  # both in the same steps
        gate.hold()
        other = engine.submit(words(40), greedy(12))
        broken = engine.submit(words(30, seed=1), sampling, listener=listener)
        gate.open()
        with pytest.raises(BaseException, match=message):
            broken.result(WAIT_S)
        assert list(other.result(WAIT_S).token_ids) == alone(words(40), 12)


def test_a_callback_of_a_future_that_fails_harms_nobody(engine: KVBoost) -> None:
    other = running(engine)
    ticket = engine.submit(words(30, seed=1), greedy(2))
    ticket.future.add_done_callback(lambda _: 1 // 0)
    assert len(ticket.result(WAIT_S).token_ids) == 2
    assert not other.future.done()
    other.cancel()


def test_a_step_that_fails_ends_its_requests_and_no_others(engine: KVBoost) -> None:
    with gate_of(engine) as gate:
        first, second = running(engine), running(engine, 1)
        waiting = engine.submit(words(50), greedy(8))
        gate.hold()
        gate.error = RuntimeError("out of memory, say")
        gate.open()
        for ticket in (first, second):
            with pytest.raises(RuntimeError, match="out of memory"):
                ticket.result(WAIT_S)
        assert list(waiting.result(WAIT_S).token_ids) == alone(words(50), 8)


def test_nobody_waits_for_rows_of_a_request_that_has_failed(engine: KVBoost) -> None:
    common = words(1200, seed=5)
    with gate_of(engine) as gate:
        gate.error = RuntimeError("once")
        failed = engine.submit([*common, 9], greedy(4))
        with pytest.raises(RuntimeError, match="once"):
            failed.result(WAIT_S)
    begun = threading.Event()
    other = engine.submit([*common, 10], ENDLESS, listener=lambda _: begun.set())
    assert begun.wait(WAIT_S)
    alike = engine.submit([*common, 11, 12], greedy(4))
    assert list(alike.result(WAIT_S).token_ids) == alone([*common, 11, 12], 4)
    assert alike.result().cached_tokens == 1184  # shared in steps of 32
    assert not other.future.done()
    other.cancel()


def test_an_error_does_not_hold_on_to_the_rows_of_its_step(engine: KVBoost) -> None:
    logging.disable()  # records would hold the traceback
    try:
        with gate_of(engine) as gate:
            gate.error = RuntimeError("once")
            ticket = engine.submit(words(60), greedy(4))
            with pytest.raises(RuntimeError, match="once"):
                ticket.result(WAIT_S)
    finally:
        logging.disable(logging.NOTSET)
    error = ticket.future.exception()
    come_to_rest(engine)
    gc.collect()
    assert error is not None
    assert live_caches() <= 1  # the spare one


def live_caches() -> int:
    return sum(issubclass(type(each), SlotCache) for each in gc.get_objects())


def test_rows_are_freed_with_their_requests_and_not_by_the_garbage_collector(
    engine: KVBoost,
) -> None:
    shared = words(150, seed=8)
    come_to_rest(engine)
    gc.collect()
    before = live_caches()
    gc.disable()
    try:
        for turn in range(50):
            tickets = [
                engine.submit(shared + words(3 + turn % 5, seed=number), greedy(2 + number))
                for number in range(4)
            ]
            tickets[3].cancel()
            for ticket in tickets[:3]:
                ticket.result(WAIT_S)
        come_to_rest(engine)
        assert live_caches() <= before + 1
    finally:
        gc.enable()


def test_a_listener_that_calls_the_engine_is_told_and_not_left_waiting(engine: KVBoost) -> None:
    asked: list[object] = []

    def ask(_: Delta) -> None:
        for call in (
            lambda: engine.submit([5], greedy(1)),
            lambda: engine.generate_batch([[5]] * 9, 1),
            lambda: KVBoost.close(engine),
        ):
            with pytest.raises(KVBoostError, match="inside a request"):
                call()
            asked.append(call)

    waiting = [running(engine)]
    ticket = engine.submit(words(20), greedy(1), listener=ask)
    waiting += [engine.submit(words(20, seed=3), greedy(1)) for _ in range(2)]
    assert len(ticket.result(WAIT_S).token_ids) == 1
    assert len(asked) == 3
    waiting[0].cancel()


def test_an_interrupted_batch_call_stops_its_requests(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(ticket: Ticket, timeout_s: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ticket, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch([words(30), words(40)], 50_000)
    monkeypatch.undo()
    come_to_rest(engine)


def test_more_prompts_than_places_are_answered_by_one_call(engine: KVBoost) -> None:
    prompts = [words(10 + number, seed=number) for number in range(4 * NUM_PLACES)]
    results = engine.generate_batch(prompts, 3)
    assert [r.token_ids for r in results] == [
        alone(p, 3)[: len(r.token_ids)] for p, r in zip(prompts, results, strict=True)
    ]


def test_other_calls_do_not_starve_the_batch(engine: KVBoost) -> None:
    ticket = running(engine)
    steps = engine.batch_stats()["num_steps"]
    calls = [0, 0]

    def call(number: int) -> None:
        while calls[number] < 400 and engine.batch_stats()["num_steps"] < steps + 20:
            engine.generate(words(20, seed=number), 2)
            calls[number] += 1

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(calls) < 100
    ticket.cancel()


def test_closing_finishes_what_runs_and_waits_and_leaves_no_thread() -> None:
    threads = threading.active_count()
    engine = engine_of(max_batch_size=2, max_queue_size=10)
    prompts = [words(30 + number, seed=number) for number in range(6)]
    tickets = [engine.submit(prompt, greedy(6)) for prompt in prompts]
    KVBoost.close(engine)
    assert all(ticket.future.done() for ticket in tickets)
    assert [list(t.result().token_ids) for t in tickets] == [alone(p, 6) for p in prompts]
    assert threading.active_count() == threads
    for _ in range(20):
        with pytest.raises(KVBoostError, match="closed"):
            engine.submit(words(20), greedy(2))


def test_who_waits_for_a_place_while_the_engine_closes_is_told() -> None:
    engine = engine_of(max_batch_size=1, max_queue_size=1)
    blockers = [running(engine), engine.submit(words(20), ENDLESS)]
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate_batch([words(20)], 2)
        except KVBoostError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    closing = threading.Thread(target=KVBoost.close, args=(engine,))
    closing.start()
    time.sleep(0.05)
    for ticket in blockers:
        ticket.cancel()
    asking.join(WAIT_S)
    closing.join(WAIT_S)
    assert not asking.is_alive() and not closing.is_alive()
    assert not errors or "closed" in str(errors[0])


def test_a_dropped_engine_ends_after_its_requests() -> None:
    engine = engine_of()
    thread = engine._worker._thread
    ticket = engine.submit(words(30), greedy(20))
    del engine
    gc.collect()
    assert list(ticket.result(WAIT_S).token_ids) == alone(words(30), 20)
    for _ in range(100):
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            break
    assert not thread.is_alive()


def test_a_model_without_reuse_has_no_batch_and_answers_one_by_one() -> None:
    model_type, differences, reason = REFUSED["falcon"]
    with KVBoost(build(model_type, differences), WordTokenizer(), strict=False) as engine:
        with pytest.raises(UnsupportedModel, match=reason):
            engine.submit(words(20), greedy(2))
        results = engine.generate_batch([words(20), words(30)], 4)
        assert [len(result.token_ids) for result in results] == [4, 4]
