"""The batch when requests are cancelled, late or too many: nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future

import pytest

from batching import (
    ENDLESS,
    NUM_PLACES,
    WAIT_S,
    alone,
    come_to_rest,
    engine_of,
    gate_of,
    greedy,
    running,
)
from fakes import WordTokenizer, words
from kvboost import ConfigError, KVBoost, KVBoostError
from kvboost.core import Sampling
from kvboost.engine.results import Delta
from kvboost.errors import DeadlineExceeded, QueueFull, UnsupportedModel
from tiny_models import REFUSED, build
from waiting import at_once, wait_until

pytestmark = pytest.mark.tiny


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
    with pytest.raises(DeadlineExceeded, match="not done in time"):
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
        with pytest.raises(QueueFull, match="3 requests are waiting already"):
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
    def ask(seed: int) -> None:
        for _ in range(20):
            engine.submit(words(20, seed=seed), greedy(1)).result(WAIT_S)

    at_once(ask, range(NUM_PLACES))


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


def test_a_listener_that_calls_the_engine_is_told_and_not_left_waiting(engine: KVBoost) -> None:
    asked: list[object] = []

    def ask(_: Delta) -> None:
        for call in (
            lambda: engine.submit([5], greedy(1)),
            lambda: engine.generate_batch([[5]] * 9, 1),
            lambda: KVBoost.close(engine),
        ):
            with pytest.raises(KVBoostError, match="engine's own thread"):
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
    def interrupted(reply: Future[object], timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
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
    for result in results:
        assert sum(result.stages_ms.values()) == pytest.approx(result.total_ms)


def test_other_calls_do_not_starve_the_batch(engine: KVBoost) -> None:
    ticket = running(engine)
    steps = engine.batch_stats()["num_steps"]
    calls = [0, 0]

    def call(number: int) -> None:
        while calls[number] < 400 and engine.batch_stats()["num_steps"] < steps + 20:
            engine.generate(words(20, seed=number), 2)
            calls[number] += 1

    at_once(call, range(2))
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


def test_a_tenant_with_many_answers_sits_steps_out_beside_one_with_few() -> None:
    def run(tenant: str) -> float:
        """Tokens of each of eight answers while another tenant's answer has fifty."""
        heard: Counter[str] = Counter()
        with engine_of(max_batch_size=16) as engine:
            crowd = [
                engine.submit(words(20, seed=number), ENDLESS, tenant="crowd",
                              listener=lambda _: heard.update(["crowd"]))
                for number in range(8)
            ]  # fmt: skip
            wait_until(lambda: heard["crowd"] > 80)
            before = heard["crowd"]
            engine.submit(words(20, seed=50), greedy(50), tenant=tenant).result(WAIT_S)
            for ticket in crowd:
                ticket.cancel()
            return (heard["crowd"] - before) / 8

    together, apart = run("crowd"), run("other")
    assert together > 40 and apart < 0.75 * together


def test_a_guest_of_another_tenant_does_not_stop_the_batch() -> None:
    heard: list[Delta] = []
    with engine_of() as engine:
        ticket = engine.submit(words(20), ENDLESS, tenant="batch", listener=heard.append)
        wait_until(lambda: len(heard) > 5)
        before = len(heard)
        engine.generate(words(20, seed=1), 40, tenant="guest", do_sample=True, min_new_tokens=40)
        assert len(heard) - before > 20  # a token for each step of the guest, or almost
        ticket.cancel()
