"""Whatever comes and goes in whatever order: each answer is its own, and nothing is left over."""

from __future__ import annotations

import random
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batching import WAIT_S, Engine, alone, check_stored_prefixes, come_to_rest, engine_of, greedy
from fakes import words
from kvboost.engine.batch.ticket import Ticket
from kvboost.errors import QueueFull

pytestmark = pytest.mark.tiny

COMMON = words(150, seed=77)
PROMPTS = [
    *(COMMON + words(3 + 8 * number, seed=number) for number in range(4)),
    COMMON[:135] + words(40, seed=5),
    words(12, seed=6),
    words(700, seed=7),
]
MOST_NEW = 10
ENGINES: list[Engine] = []


@pytest.fixture(scope="module", autouse=True)
def engine() -> object:
    """One for all examples, as a server has one for all clients."""
    with engine_of(max_batch_size=3, max_queue_size=5, max_chunks=40) as made:
        ENGINES.append(made)
        yield
        ENGINES.clear()


class Traffic(RuleBasedStateMachine):
    """Requests that are sent, awaited and cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = ENGINES[0]
        self.open: list[tuple[int, int, Ticket]] = []

    @rule(
        place=st.integers(0, len(PROMPTS) - 1),
        num_new=st.integers(1, MOST_NEW),
        reuse=st.sampled_from(["exact", "exact", "off", "auto"]),
        tenant=st.sampled_from(["", "", "other"]),
    )
    def submit(self, place: int, num_new: int, reuse: str, tenant: str) -> None:
        try:
            ticket = self.engine.submit(PROMPTS[place], greedy(num_new), reuse=reuse, tenant=tenant)
        except QueueFull:
            assert len(self.open) >= 8
        else:
            # Whoever shares no exact rows may take moved ones, with which answers can differ.
            self.open.append((place if reuse != "auto" else -1, num_new, ticket))

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.open:
            place, num_new, ticket = self.open.pop(which % len(self.open))
            ticket.cancel()
            with suppress(CancelledError):
                self.check(place, num_new, ticket)

    @rule(which=st.integers(0, 100))
    def wait(self, which: int) -> None:
        if self.open:
            self.check(*self.open.pop(which % len(self.open)))

    @rule(seed=st.integers(0, 2))
    def call_beside(self, seed: int) -> None:
        tokens = words(30, seed=400 + seed)
        assert self.engine.generate(tokens, 2, eos_token_id=None).token_ids == alone(tokens, 2)

    @invariant()
    def sizes_are_within_limits(self) -> None:
        stats = self.engine.batch_stats()
        assert stats["num_running"] <= 3 and stats["num_waiting"] <= 8 + 5  # extra places

    def check(self, place: int, num_new: int, ticket: Ticket) -> None:
        tokens = list(ticket.result(WAIT_S).token_ids)
        assert len(tokens) == num_new
        assert place < 0 or tokens == alone(PROMPTS[place], MOST_NEW)[:num_new]

    def teardown(self) -> None:
        for each in random.sample(self.open, len(self.open)):
            self.check(*each)
        come_to_rest(self.engine)
        stats = self.engine.batch_stats()
        assert stats["kv_bytes"] == 0 and len(self.engine._front._batch._live) == 0
        assert not self.engine._front._capacity._taken
        check_stored_prefixes(self.engine, most=1)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
