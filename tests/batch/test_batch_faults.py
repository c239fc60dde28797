"""Requests, steps and models that fail: only who has to do with it notices."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
import torch

from batching import ENDLESS, WAIT_S, alone, come_to_rest, gate_of, greedy, running
from fakes import words
from kvboost import KVBoost
from kvboost.core import Sampling
from kvboost.engine.results import Delta
from kvboost.models.slots import SlotCache

pytestmark = pytest.mark.tiny


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
