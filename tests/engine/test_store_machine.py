"""Two processes, a shared tier, disks, faults and deletions at random: what is placed is right.

Exact K/V is what a fresh computation gives at its position; moved K/V is one stored copy, turned.
Both are of the tenant that asks, since its last deletion.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import shake_128
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fakes import GEOMETRY, FakeModel, FakeSlots, FaultyDisk, FaultyTier, store_of, words
from kvboost.config import make_options
from kvboost.core import FrameKey, MatchKind, ReusePlan, Span
from kvboost.engine.prefill import Terms, keep, look_up, prefetch, space_of
from kvboost.reuse.place import assemble
from kvboost.rope import move
from kvboost.tiers.notes import read_epoch

TEXTS = [words(100, seed) for seed in range(4)]
QUESTIONS = [words(6, 50 + seed) for seed in range(3)]
TENANTS = ("", "other")
FAULTS = ("down", "frozen", "slow", "lost", "truncated", "corrupted")
DEADLINE_S = 0.05
CHUNK_SIZE = 16
EPOCH_BYTES = 16
MEMORY_BYTES = 16 * (CHUNK_SIZE * GEOMETRY.bytes_per_token + 500)  # holds two prompts, not three


class Disk(FaultyDisk):
    """Keeps epochs beside its frames."""

    name = "disk"

    def epochs(self) -> dict[FrameKey, int]:
        notes = {k: memoryview(f) for k, f in self.frames.items() if len(f) == EPOCH_BYTES}
        return {key: read_epoch(note) for key, note in notes.items()}


@dataclass(frozen=True)
class Computed:
    """Rows of one request, and which of them were computed there."""

    tokens: list[int]
    rows: list[torch.Tensor]
    is_computed: np.ndarray


def fresh_rows(tokens: list[int]) -> list[torch.Tensor]:
    """What a model computes for a prompt: a row depends on all tokens before it and its place."""
    sizes = [len(g.planes) * g.heads * g.head_dim for g in GEOMETRY.groups]
    said = np.asarray(tokens, "<u4").tobytes()
    raw = [shake_128(said[: 4 * stop]).digest(sum(sizes)) for stop in range(1, len(tokens) + 1)]
    numbers = torch.tensor([list(each) for each in raw], dtype=torch.float32) / 128 - 1
    rows = [
        part.reshape(len(tokens), len(g.planes), g.heads, g.head_dim).permute(1, 2, 0, 3).clone()
        for g, part in zip(GEOMETRY.groups, numbers.split(sizes, dim=1), strict=True)
    ]
    for place in range(len(tokens)):
        move([part[:, :, place : place + 1] for part in rows], GEOMETRY, FakeModel.rotations, place)
    return rows


class Process:
    """One engine's store, without the engine."""

    def __init__(self, shared: FaultyTier, disk: Disk) -> None:
        self.disk = disk
        self.store = store_of(MEMORY_BYTES, below=[disk, shared], deadline_s=DEADLINE_S)
        self.parts: Any = SimpleNamespace(
            options=make_options({"chunk_size": CHUNK_SIZE}),
            model=SimpleNamespace(fingerprint=b"model", rotations=FakeModel.rotations),
            boundaries=frozenset(),
            piece_tokens=None,
            store=self.store,
            cost=SimpleNamespace(predict=lambda _: None),
        )


class Stores(RuleBasedStateMachine):
    """Prompts are made of the same few texts, so that they share beginnings and middles."""

    num_steps = 0

    @initialize()
    def start(self) -> None:
        self.shared = FaultyTier()
        self.processes = [Process(self.shared, Disk()) for _ in range(2)]
        self.computed: dict[tuple[str, int], list[Computed]] = {}

    @rule(
        number=st.integers(0, 1),
        tenant=st.sampled_from(TENANTS),
        order=st.lists(st.sampled_from(range(4)), min_size=1, max_size=2, unique=True),
        question=st.sampled_from(range(3)),
        is_cancelled=st.booleans(),
    )
    def ask(
        self, number: int, tenant: str, order: list[int], question: int, *, is_cancelled: bool
    ) -> None:
        process = self.processes[number]
        parts, store = process.parts, process.store
        tokens = [t for each in order for t in TEXTS[each]] + QUESTIONS[question]
        terms = Terms("auto", tenant)
        prefetched = prefetch(tokens, parts, terms)
        space, epoch = space_of(tenant, parts), store.epochs.of(tenant)
        slots = FakeSlots(len(tokens), seed=len(self.computed))
        plan = look_up(tokens, parts, terms)
        chunks = store.tiers.memory.get([match.key for match in plan.matches])
        prefetched.release()
        plan = assemble(plan, tokens, slots, FakeModel(), store, space, chunks).plan
        known = self.computed.setdefault((tenant, epoch), [])
        fresh = fresh_rows(tokens)
        self.check(tokens, plan, slots, fresh, known)
        is_computed = np.arange(len(tokens)) < slots.exact_stop  # or as good as that
        for span in plan.live:
            is_computed[span.start : span.stop] = True
            exact = Span(span.start, min(span.stop, slots.exact_stop))
            if span.start < slots.exact_stop:
                slots.write(exact, [part[:, :, exact.start : exact.stop] for part in fresh])
        if not is_cancelled:
            rows = [part.clone() for part in slots.rows]
            known.append(Computed(tokens, rows, is_computed))
            prefilled: Any = SimpleNamespace(rows=slots, space=space, num_deletions=0, plan=plan)
            keep(prefilled, tokens, parts, tenant=tenant)

    def check(
        self,
        tokens: list[int],
        plan: ReusePlan,
        slots: FakeSlots,
        fresh: list[torch.Tensor],
        known: list[Computed],
    ) -> None:
        for match in plan.matches:
            start, stop = match.span.start, match.span.stop
            placed = slots.read(match.span)
            if match.kind is MatchKind.EXACT:
                assert any(each.tokens[:stop] == tokens[:stop] for each in known)
                for got, wanted in zip(placed, fresh, strict=True):
                    assert torch.equal(got, wanted[:, :, start:stop])
            else:
                said = tokens[start:stop]
                assert any(is_a_copy(placed, start, said, each) for each in known)

    @rule(number=st.integers(0, 1))
    def evict(self, number: int) -> None:
        store = self.processes[number].store
        store.tiers.flush(2 * DEADLINE_S)
        memory = store.tiers.memory
        keys = list(memory._chunks)
        memory.discard(keys)
        store.tiers._note_gone(keys)

    @rule(fault=st.sampled_from(FAULTS), where=st.integers(0, 2))
    def break_tier(self, fault: str, where: int) -> None:
        tier = self.tiers()[where]
        tier.thawed.clear()
        tier.fault = fault

    @rule(where=st.integers(0, 2))
    def mend_tier(self, where: int) -> None:
        tier = self.tiers()[where]
        tier.fault = ""
        tier.thawed.set()

    @rule(number=st.integers(0, 1))
    def wait_for_writes(self, number: int) -> None:
        self.processes[number].store.tiers.flush(1.0)

    @rule(number=st.integers(0, 1), tenant=st.sampled_from(TENANTS))
    def delete(self, number: int, tenant: str) -> None:
        store = self.processes[number].store
        before = store.epochs.of(tenant)
        store.delete_all(tenant, store.tiers.patience())
        assert store.epochs.of(tenant) > before

    @rule(number=st.integers(0, 1))
    def restart(self, number: int) -> None:
        """With what its disk has kept; the shared tier stays."""
        for each in (self.shared, self.processes[number].disk):
            each.fault = ""
            each.thawed.set()
        old = self.processes[number]
        old.store.tiers.close()
        self.processes[number] = Process(self.shared, old.disk)

    @invariant()
    def count(self) -> None:
        Stores.num_steps += 1

    def tiers(self) -> list[FaultyTier]:
        return [self.shared, *(process.disk for process in self.processes)]

    def teardown(self) -> None:
        for tier in self.tiers() if hasattr(self, "shared") else ():
            tier.fault = ""
            tier.thawed.set()
        for process in getattr(self, "processes", ()):
            process.store.tiers.close()


def is_a_copy(placed: list[torch.Tensor], start: int, said: list[int], copy: Computed) -> bool:
    """Whether rows are those of a copy, turned from their old place to `start`."""
    for home in range(len(copy.tokens) - len(said) + 1):
        stop = home + len(said)
        if copy.tokens[home:stop] != said or not copy.is_computed[home:stop].all():
            continue
        rows = [part[:, :, home:stop].clone() for part in copy.rows]
        move(rows, GEOMETRY, FakeModel.rotations, start - home)
        if all(torch.allclose(a, b, atol=1e-4) for a, b in zip(placed, rows, strict=True)):
            return True
    return False


def run(num_steps: int) -> None:
    check = settings(
        max_examples=10,
        derandomize=False,  # or every round would be the same
        stateful_step_count=50,
        deadline=None,
        phases=[Phase.generate],  # threads take turns as they like: nothing can be shrunk
        suppress_health_check=list(HealthCheck),
    )
    Stores.num_steps = 0
    while Stores.num_steps < num_steps:
        run_state_machine_as_test(Stores, settings=check)


def test_what_is_placed_is_right_whatever_happens() -> None:
    run(500)


@pytest.mark.long
def test_what_is_placed_is_right_at_length() -> None:
    run(10_000)
