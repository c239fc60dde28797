"""Requests, steps and models that fail: only who has to do with it notices."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
import torch

from batching import (
    ENDLESS,
    WAIT_S,
    Gate,
    alone,
    answers,
    check_stored_prefixes,
    come_to_rest,
    engine_of,
    gate_of,
    greedy,
    running,
)
from fakes import words
from kvboost import KVBoost
from kvboost.core import MatchKind, Sampling
from kvboost.engine.results import Delta
from kvboost.models import spread
from kvboost.models.rows import Rows

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


def test_a_step_that_fails_for_all_ends_its_requests_and_no_others(engine: KVBoost) -> None:
    with gate_of(engine) as gate:
        first, second = running(engine), running(engine, 1)
        waiting = engine.submit(words(50), greedy(8))
        gate.hold()
        gate.fail(RuntimeError("out of memory, say"), times=3)  # together, and each alone
        gate.open()
        for ticket in (first, second):
            with pytest.raises(RuntimeError, match="out of memory"):
                ticket.result(WAIT_S)
        assert list(waiting.result(WAIT_S).token_ids) == alone(words(50), 8)


def test_a_step_that_fails_once_ends_nobody(engine: KVBoost) -> None:
    prompts = [words(40 + number, seed=number) for number in range(2)]
    with gate_of(engine) as gate:
        gate.fail(RuntimeError("once"), when=lambda: engine.batch_stats()["num_running"] == 2)
        gate.hold()
        tickets = [engine.submit(prompt, greedy(12)) for prompt in prompts]
        gate.open()
        assert answers(tickets) == [alone(prompt, 12) for prompt in prompts]
        assert not gate.num_errors


BAD = 500


def spoil(engine: KVBoost, place: str) -> list[Any]:
    """Let forwards with a certain token fail: at their start, in a layer, or when K/V is there."""
    model: Any = engine._parts.model.model
    is_bad = False

    def look(_: Any, arguments: Any, named: dict[str, Any]) -> None:
        nonlocal is_bad
        is_bad = bool((named["input_ids"] == BAD).any())

    def fail(*_: Any) -> None:
        if is_bad:
            raise RuntimeError("a bad token")

    parts = {"start": model.model, "layer": model.model.layers[-1].mlp, "end": model.lm_head}
    return [
        model.register_forward_pre_hook(look, with_kwargs=True),
        parts[place].register_forward_pre_hook(fail),
    ]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("place", ["start", "layer", "end"])
@pytest.mark.parametrize("options", [{"block_size": 7}, {"block_size": 16}], ids=str)
def test_a_request_that_breaks_forwards_fails_alone(
    options: dict[str, Any], place: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [token for token in words(160, seed=9) if token != BAD]
    healthy = [common + [10 + number] * (number + 1) for number in range(3)]
    bad = [*common, BAD, 11] if phase == "prefill" else [*common, 12]
    sampling = Sampling(max_new_tokens=9, logit_bias={BAD: 1e3} if phase == "decode" else {})
    wanted = [alone(prompt, 9) for prompt in healthy]
    assert not any(BAD in answer for answer in wanted)
    with engine_of(batch_window_ms=200, **options) as engine:
        hooks = spoil(engine, place)
        # Rows that were not brought back would be written a second time, by other kernels.
        monkeypatch.setattr(spread, "patches", None)
        engine.submit(common, greedy(1)).result(WAIT_S)
        culprit = engine.submit(bad, sampling)
        tickets = [engine.submit(prompt, greedy(9)) for prompt in healthy]
        assert answers(tickets) == wanted
        with pytest.raises(RuntimeError, match="a bad token"):
            culprit.result(WAIT_S)
        for hook in hooks:
            hook.remove()
        assert check_stored_prefixes(engine) > 0


def test_moved_text_is_repaired_once_though_its_step_was_repeated() -> None:
    document = words(300, seed=3)
    prompt = words(40, seed=5) + document + words(30, seed=6)
    options = {"chunk_size": 32, "reuse": "auto", "quality_budget": 100.0, "batch_window_ms": 200}
    texts = []
    for num_errors in (0, 1):
        with engine_of(**options) as engine:
            engine._parts.cost.pays = lambda *_: True
            engine.generate(words(20, seed=4) + document, 1)
            layer: Any = engine._parts.model.model.model.layers[-1]
            gate = Gate()
            gate.fail(RuntimeError("once"), times=num_errors)
            hook = layer.mlp.register_forward_pre_hook(gate)
            tickets = [engine.submit(prompt, greedy(8)), engine.submit(words(30), greedy(8))]
            texts.append(answers(tickets))
            hook.remove()
            assert tickets[0].result().reuse.tokens(MatchKind.MOVED) > 200
            assert tickets[0].result().reuse.repaired_tokens > 0
            assert gate.num_errors == 0
    assert texts[0] == texts[1]


def test_nobody_waits_for_rows_of_a_request_that_has_failed(engine: KVBoost) -> None:
    common = words(1200, seed=5)
    with gate_of(engine) as gate:
        gate.fail(RuntimeError("once"))
        failed = engine.submit([*common, 9], greedy(4))
        with pytest.raises(RuntimeError, match="once"):
            failed.result(WAIT_S)
    begun = threading.Event()
    other = engine.submit([*common, 10], ENDLESS, listener=lambda _: begun.set())
    assert begun.wait(WAIT_S)
    alike = engine.submit([*common, 11, 12], greedy(4))
    assert list(alike.result(WAIT_S).token_ids) == alone([*common, 11, 12], 4)
    assert alike.result().cached_tokens == 1200
    assert not other.future.done()
    other.cancel()


def test_an_error_does_not_hold_on_to_the_rows_of_its_step(engine: KVBoost) -> None:
    logging.disable()  # records would hold the traceback
    try:
        with gate_of(engine) as gate:
            gate.fail(RuntimeError("once"))
            ticket = engine.submit(words(60), greedy(4))
            with pytest.raises(RuntimeError, match="once"):
                ticket.result(WAIT_S)
    finally:
        logging.disable(logging.NOTSET)
    error = ticket.future.exception()
    come_to_rest(engine)
    gc.collect()
    assert error is not None
    assert live_caches() == 0


def live_caches() -> int:
    return sum(issubclass(type(each), Rows) for each in gc.get_objects())


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
