"""The two stages that touch bytes, on a fake buffer: what goes in comes out, faults are misses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import GEOMETRY, FakeModel, FakeSlots, store_of
from kvboost.core import ContentKey, PrefixKey, Provenance, ReusePlan, Span
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import find
from kvboost.reuse.place import assemble
from kvboost.reuse.store import commit

SPACE = namespace(b"model", "", None)


class Store:
    def __init__(self, budget_bytes: int = 10**6) -> None:
        self.all = store_of(budget_bytes)
        self.index, self.memory, self.metrics = (
            self.all.index,
            self.all.tiers.memory,
            self.all.metrics,
        )

    def commit(self, tokens: list[int], slots: FakeSlots, window: int = 0) -> None:
        chunks = split(tokens, 8, window, {0})
        commit(slots, chunks, derive(chunks, SPACE), SPACE, self.all)

    def find(self, tokens: list[int], window: int = 0) -> ReusePlan:
        chunks = split(tokens, 8, window, {0})
        return find(chunks, derive(chunks, SPACE), self.index)

    def assemble(self, tokens: list[int], slots: FakeSlots) -> ReusePlan:
        plan = self.find(tokens)
        chunks = self.all.tiers.get([match.key for match in plan.matches])
        return assemble(plan, tokens, slots, FakeModel(), self.all, SPACE, chunks).plan


def test_rows_come_back_where_they_were() -> None:
    store, tokens = Store(), list(range(30))
    source, target = FakeSlots(30, seed=1), FakeSlots(30, seed=2)
    store.commit(tokens, source)
    untouched = [rows.clone() for rows in target.read(Span(25, 30))]
    plan = store.assemble([*tokens[:25], 99, 99], target)
    assert plan.num_reused == 25
    for got, expected in zip(target.read(Span(0, 25)), source.read(Span(0, 25)), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(target.read(Span(25, 30)), untouched, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "forged", [{"tokens": bytes(32)}, {"home": 16}, {"parent": PrefixKey(bytes(31) + b"1")}]
)
def test_a_frame_of_other_tokens_history_or_position_is_a_miss_and_discarded(
    forged: dict[str, Any],
) -> None:
    store, tokens, target = Store(), list(range(30)), FakeSlots(30, seed=2)
    store.commit(tokens, FakeSlots(30, seed=1))
    plan = store.find(tokens)
    chunks = dict(store.all.tiers.get([match.key for match in plan.matches]))
    second = plan.matches[1].key
    entry = replace(chunks[second].entry, **forged)
    chunks[second] = SimpleNamespace(entry=entry, kv=chunks[second].kv)
    placed = assemble(plan, tokens, target, FakeModel(), store.all, SPACE, chunks)
    assert placed.plan.num_reused == 8 and placed.lost == (second,)
    assert store.metrics.snapshot()["damaged_frames"] == 1
    assert not store.memory.holds(second)


def test_approximate_rows_under_a_prefix_key_are_a_miss_and_discarded() -> None:
    store, tokens, target = Store(), list(range(30)), FakeSlots(30, seed=2)
    store.commit(tokens, FakeSlots(30, seed=1))
    plan = store.find(tokens)
    chunks = dict(store.all.tiers.get([match.key for match in plan.matches]))
    first = plan.matches[0].key
    said = {"provenance": Provenance.APPROXIMATE, "prefix": None, "content": ContentKey(first)}
    entry = replace(chunks[first].entry, **said)
    chunks[first] = SimpleNamespace(entry=entry, kv=chunks[first].kv)
    placed = assemble(plan, tokens, target, FakeModel(), store.all, SPACE, chunks)
    assert placed.plan.num_reused == 0 and placed.lost == (first,)
    assert not store.memory.holds(first)


def test_a_frame_that_cannot_be_placed_is_a_miss_and_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, tokens, target = Store(), list(range(30)), FakeSlots(30, seed=2)
    store.commit(tokens, FakeSlots(30, seed=1))
    first = store.find(tokens).matches[0].key

    def fail(*_: object) -> None:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(target, "place", fail)
    assert store.assemble(tokens, target).num_reused == 0
    assert store.metrics.snapshot()["damaged_frames"] == 1
    assert not store.memory.holds(first)


def test_a_frame_of_another_namespace_is_a_miss_and_counted() -> None:
    store, tokens, target = Store(), list(range(30)), FakeSlots(30, seed=2)
    chunks, other = split(tokens, 8), namespace(b"model and adapter", "", None)
    commit(FakeSlots(30, seed=1), chunks, derive(chunks, SPACE), other, store.all)
    before = [rows.clone() for rows in target.read(Span(0, 30))]
    first = store.find(tokens).matches[0].key
    assert store.assemble(tokens, target).num_reused == 0
    assert all(map(torch.equal, target.read(Span(0, 30)), before))
    assert store.metrics.snapshot()["foreign_frames"] == 1
    assert not store.memory.holds(first)


def test_approximate_rows_are_refused_a_prefix_key() -> None:
    store, slots = Store(), FakeSlots(30)
    slots.exact_stop = 20
    with pytest.raises(ValueError, match="approximate"):
        store.commit(list(range(30)), slots)
    assert store.memory.stats().num_entries == 0


def test_a_growing_conversation_keeps_one_copy_of_its_tail() -> None:
    store, tokens = Store(), list(range(60))
    for length in (20, 27, 28, 60, 30):
        store.commit(tokens[:length], FakeSlots(60))
    assert store.memory.stats().num_entries == len(store.index) == 8  # 7 whole chunks and a tail
    assert store.find([*tokens, 1]).num_reused == 60


def test_index_and_tier_hold_the_same_when_the_budget_is_small() -> None:
    one_chunk = 8 * GEOMETRY.bytes_per_token + 256
    store = Store(budget_bytes=5 * one_chunk)
    for first in range(20):
        tokens = [first, *range(40)]
        store.commit(tokens, FakeSlots(41))
        held = store.memory.stats().num_entries
        assert len(store.index) == held <= 5
        # What is kept of a long prompt is its beginning: the rest is of no use without it.
        assert store.find(tokens).num_reused >= 32


def test_a_pinned_tail_survives_a_longer_copy() -> None:
    store, tokens = Store(), list(range(30))
    store.commit(tokens[:20], FakeSlots(30))
    tail = derive(split(tokens[:20], 8), SPACE)[-1].prefix
    assert store.memory.pin([tail], None) == [tail]
    store.commit(tokens, FakeSlots(30))
    assert store.memory.holds(tail)


@given(st.lists(st.integers(0, 3), min_size=18, max_size=60), st.data())
def test_what_was_stored_last_is_found_whole_wherever_it_is_cut(
    tokens: list[int], data: st.DataObject
) -> None:
    store, window = Store(), data.draw(st.integers(0, 6))
    for _ in range(data.draw(st.integers(0, 4))):
        length = data.draw(st.integers(1, len(tokens)))
        store.commit(tokens[:length], FakeSlots(60), window)
    store.commit(tokens, FakeSlots(60), window)
    assert store.find([*tokens, 9], window).num_reused == len(tokens)


def test_pins_over_one_another_keep_the_longest() -> None:
    store, tokens = Store(), list(range(16))
    store.commit(tokens, FakeSlots(16))
    keys = [key.prefix for key in derive(split(tokens, 8), SPACE)]
    store.memory.pin(keys, ttl_s=None)
    store.memory.pin(keys, ttl_s=0)
    assert not store.all.tiers.discard(keys[0])


def test_a_lack_of_memory_costs_no_stored_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tokens, target = Store(), list(range(30)), FakeSlots(30, seed=2)
    store.commit(tokens, FakeSlots(30, seed=1))
    first = store.find(tokens).matches[0].key

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory on the device")

    monkeypatch.setattr(target, "place", fail)
    with pytest.raises(torch.OutOfMemoryError):
        store.assemble(tokens, target)
    assert store.memory.holds(first)


@pytest.mark.parametrize("is_wanted", [False, True])
def test_of_a_text_that_is_too_long_for_memory_the_beginning_stays(is_wanted: bool) -> None:
    store, tokens = Store(10 * (8 * GEOMETRY.bytes_per_token + 320)), list(range(160))
    chunks = split(tokens, 8)
    keys = derive(chunks, SPACE)
    commit(FakeSlots(160), chunks, keys, SPACE, store.all, is_wanted=is_wanted)
    assert [store.memory.holds(key.prefix) for key in keys] == [True] * 10 + [False] * 10
