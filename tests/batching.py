"""For tests of the batch: tiny engines, what Transformers answers, a model that can be held."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.core import Sampling, Span
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.prefill import Terms, complete, prefill
from tiny_models import SUPPORTED, build
from waiting import wait_until

ENDLESS = Sampling(max_new_tokens=100_000, ignore_eos=True)
WAIT_S = 120.0  # for what must come
NUM_PLACES = 5  # of the engine in tests/batch/conftest.py


class Engine(KVBoost):
    """Ends what a failed test left running, so that the next one can begin."""

    def close(self) -> None:
        batch = self._front._batch
        self._worker.call(lambda: [m.ticket.cancel() for m in [*batch._running, *batch._waiting]])
        super().close()


def engine_of(name: str = "llama", **options: Any) -> Engine:
    model = build(*SUPPORTED[name])
    return Engine(model, WordTokenizer(), **{"chunk_size": 16, **options})


DOCUMENTS = [words(110 + 20 * seed, seed) for seed in range(4)]


def about(order: list[int], seed: int) -> list[int]:
    """A prompt with documents in this order."""
    listed = [token for place in order for token in [7, 8, *DOCUMENTS[place]]]
    return words(12, 100 + seed) + listed + words(15, 200 + seed)


def moving_engine(name: str = "llama", **options: Any) -> Engine:
    """Reuses moved text, whatever it costs: for a model of a few thousand weights nothing pays."""
    moving = {"chunk_size": 32, "reuse": "auto", "quality_budget": 100.0}
    engine = engine_of(name, **{**moving, **options})
    engine._parts.cost.pays = lambda *_: True
    return engine


def greedy(num_new: int) -> Sampling:
    return Sampling(max_new_tokens=num_new, ignore_eos=True)


def mixed_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Some alone, some with a common beginning that is long enough to be shared."""
    chance = random.Random(seed)
    common = words(160, seed=99)
    return [
        common[: chance.choice([0, 30, 130, 150, 160])] + words(chance.randint(1, 90), seed=number)
        for number in range(count)
    ]


def alone(prompt: list[int], num_new: int, name: str = "llama") -> list[int]:
    """What Transformers alone answers, come what may."""
    return _answer(name, tuple(prompt), num_new)


@cache
def _model(name: str) -> PreTrainedModel:
    return build(*SUPPORTED[name])


@cache
def _answer(name: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = _model(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def answers(tickets: list[Ticket]) -> list[list[int]]:
    return [list(ticket.result(WAIT_S).token_ids) for ticket in tickets]


def running(engine: KVBoost, seed: int = 0, **arguments: Any) -> Ticket:
    """A request that decodes without end."""
    begun = threading.Event()
    ticket = engine.submit(
        words(30, seed=seed), ENDLESS, listener=lambda _: begun.set(), **arguments
    )
    assert begun.wait(WAIT_S)
    return ticket


class Gate:
    """Stands before every forward of a model: holds it, or makes it fail."""

    def __init__(self) -> None:
        self.is_reached, self._go_on = threading.Event(), threading.Event()
        self._go_on.set()
        self.error: Exception | None = None
        self.num_errors = 0  # forwards that fail, from now on
        self._fails: Callable[[], bool] = lambda: True

    def hold(self) -> None:
        self._go_on.clear()
        self.is_reached.clear()

    def open(self) -> None:
        self._go_on.set()

    def fail(
        self, error: Exception, times: int = 1, when: Callable[[], bool] = lambda: True
    ) -> None:
        self._fails = when
        self.error, self.num_errors = error, times

    def __call__(self, *_: Any) -> None:
        self.is_reached.set()
        assert self._go_on.wait(WAIT_S)
        if self.error is not None and self.num_errors and self._fails():
            self.num_errors -= 1
            raise self.error


@contextmanager
def gate_of(engine: KVBoost) -> Iterator[Gate]:
    gate = Gate()
    hook = engine._parts.model.model.register_forward_pre_hook(gate)
    try:
        yield gate
    finally:
        gate.open()
        hook.remove()


def are_all_free(engine: KVBoost) -> bool:
    """Whether running requests have given all their blocks back."""
    engine.flush()
    return engine._parts.pool.stats()["used_blocks"] == 0


def come_to_rest(engine: KVBoost) -> None:
    """Wait until all that was submitted has ended."""
    engine._worker.call(lambda: None)
    wait_until(
        lambda: engine.batch_stats()["num_running"] == engine.batch_stats()["num_waiting"] == 0
    )
    engine.flush()


def check_stored_prefixes(engine: KVBoost, most: int = 4) -> int:
    """What is stored under prefix keys is what the model computes; how many were looked at."""
    engine.flush()
    parts, index = engine._parts, engine._parts.store.index
    rows = [row for row, tokens in enumerate(index._tokens) if tokens is not None]
    exact = [index._entry(row) for row in rows if index._is_exact[row]]
    parents, chains = {entry.parent for entry in exact}, []
    for entry in [entry for entry in exact if entry.prefix not in parents]:
        chain, first = [], -1
        while entry is not None:
            chain[:0] = torch.frombuffer(bytearray(entry.tokens), dtype=torch.int32).tolist()
            first, entry = entry.home, index.before(entry)
        if first == 0:
            chains.append([*chain, 5])
    chosen = random.Random(len(chains)).sample(chains, min(most, len(chains)))
    for tokens in chosen:
        rows = []
        for mode in ("exact", "off"):
            made = prefill(tokens, parts, Terms(mode), capacity=len(tokens))
            complete(made, tokens, parts)
            rows.append([part.clone() for part in made.rows.read(Span(0, len(tokens)))])
            made.rows.release()
        for stored, computed in zip(*rows, strict=True):
            assert float((stored - computed).abs().max()) < 1e-4
    return len(chosen)
