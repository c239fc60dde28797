"""Rows in blocks: whatever is written, shared and given back, each sequence has its own rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from fakes import GEOMETRY
from kvboost.core import Span
from kvboost.errors import KVBoostError
from kvboost.models.packed import ForwardCache, Segment
from kvboost.models.pool import BlockPool
from kvboost.models.rows import TURNED_AT_ONCE, Rows, private_rows

CPU = torch.device("cpu")
MOST_ROWS = 80


def pool_of(num_blocks: int, block_size: int) -> BlockPool:
    return BlockPool(GEOMETRY, num_blocks, block_size, CPU)


def numbers(num_rows: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(g.planes), g.heads, num_rows, g.head_dim, generator=generator)
        for g in GEOMETRY.groups
    ]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Sequence:
    """A sequence in the pool, and what its rows must hold."""

    def __init__(self, rows: Rows, most: int, shared: list[torch.Tensor] | None = None) -> None:
        self.rows, self.most = rows, most
        self.frozen = 0  # rows that others read or that are stored
        self.wanted = [
            part.new_zeros((*part.shape[:2], MOST_ROWS, part.shape[3])) for part in numbers(1, 0)
        ]
        for part, given in zip(self.wanted, shared or [], strict=bool(shared)):
            part[:, :, : rows.num_shared] = given

    def write(self, span: Span, seed: int) -> None:
        kv = numbers(len(span), seed)
        self.rows.write(span, kv)
        for part, given in zip(self.wanted, kv, strict=True):
            part[:, :, span.start : span.stop] = given


def forward(sequences: list[Sequence], positions: list[range | list[int]], seed: int) -> None:
    """What a forward does with the K/V that it computes."""
    segments = [
        Segment(each.rows, list(places), places)
        for each, places in zip(sequences, positions, strict=True)
    ]
    cache = ForwardCache(GEOMETRY, segments, packs=True)
    kv = numbers(sum(len(segment.tokens) for segment in segments), seed)
    planes = {
        plane: part[place][None]
        for group, part in zip(GEOMETRY.groups, kv, strict=True)
        for place, plane in enumerate(group.planes)
    }
    for layer in range(GEOMETRY.num_layers):
        cache.layers[layer].update(planes[2 * layer], planes[2 * layer + 1])
    cache.finish()
    for each, places, segment in zip(sequences, positions, segments, strict=True):
        for part, given in zip(each.wanted, kv, strict=True):
            part[:, :, list(places)] = given[:, :, segment.start : segment.stop]


class Traffic(RuleBasedStateMachine):
    """Sequences come as long as they fit: then none of them may ever run out of blocks."""

    sequences: Bundle[Sequence] = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 30), block_size=st.integers(1, 7))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = pool_of(num_blocks, block_size)
        self.pool.evict = lambda num_bytes: self._evict()
        self.running: list[Sequence] = []
        self.kept: list[tuple[list[tuple[int, int]], list[torch.Tensor]]] = []
        self.seed = 0

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed

    def _may_join(self, most: int) -> bool:
        sizes = [(each.rows, each.most) for each in self.running]
        return most <= self.pool.room(sizes)

    def _join(self, sequence: Sequence) -> Sequence:
        self.running.append(sequence)
        return sequence

    @rule(target=sequences, most=st.integers(1, MOST_ROWS), given=st.integers(0, MOST_ROWS))
    def join(self, most: int, given: int) -> object:
        if not self._may_join(most):
            return multiple()
        return self._join(Sequence(Rows(self.pool, min(given, most)), most))

    @rule(target=sequences, owner=sequences, most=st.integers(2, MOST_ROWS), data=st.data())
    def join_on_shared_rows(self, owner: Sequence, most: int, data: st.DataObject) -> object:
        longest = min(owner.rows.length, most - 1)
        if longest == 0 or not self._may_join(most):
            return multiple()
        span = Span(0, data.draw(st.integers(1, longest)))
        given = data.draw(st.integers(span.stop, most))
        owner.frozen = max(owner.frozen, span.stop)
        rows = Rows(self.pool, given, owner.rows.runs(span))
        return self._join(Sequence(rows, most, owner.rows.read(span)))

    @rule(owner=sequences, data=st.data())
    def keep(self, owner: Sequence, data: st.DataObject) -> None:
        if owner.rows.length:
            start = data.draw(st.integers(0, owner.rows.length - 1))
            span = Span(start, data.draw(st.integers(start + 1, owner.rows.length)))
            if span.stop <= owner.rows.num_shared or len(self.kept) < 3:
                self.kept.append(
                    (owner.rows.runs(span), [part.clone() for part in owner.rows.read(span)])
                )
                self.pool.keep(self.kept[-1][0])
                owner.frozen = max(owner.frozen, span.stop)

    def _evict(self) -> bool:
        if not self.kept:
            return False
        rows, wanted = self.kept.pop()
        assert same(self.pool.read(rows), wanted)
        self.pool.drop(rows)
        return True

    @rule()
    def forget(self) -> None:
        self._evict()

    @rule(sequence=sequences, count=st.integers(1, 20))
    def append(self, sequence: Sequence, count: int) -> None:
        first = sequence.rows.length
        count = min(count, sequence.most - first)
        if count:
            forward([sequence], [range(first, first + count)], self._next_seed())

    @rule()
    def append_together(self) -> None:
        growing = [each for each in self.running if each.rows.length < each.most]
        if growing:
            places = [range(each.rows.length, each.rows.length + 1) for each in growing]
            forward(growing, places, self._next_seed())

    @rule(sequence=sequences, data=st.data())
    def write(self, sequence: Sequence, data: st.DataObject) -> None:
        first = max(sequence.rows.num_shared, sequence.frozen)
        last = min(sequence.rows.length, sequence.most - 1)
        if first <= last:
            start = data.draw(st.integers(first, last))
            stop = data.draw(st.integers(start + 1, sequence.most))
            sequence.write(Span(start, stop), self._next_seed())

    @rule(sequence=sequences, data=st.data())
    def compute_again(self, sequence: Sequence, data: st.DataObject) -> None:
        first = max(sequence.rows.num_shared, sequence.frozen)
        own = range(first, sequence.rows.length)
        if own:
            positions = data.draw(st.lists(st.sampled_from(own), min_size=1, unique=True))
            forward([sequence], [positions], self._next_seed())

    @rule(sequence=consumes(sequences))
    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.rows.release()

    @invariant()
    def everyone_reads_what_it_wrote(self) -> None:
        for each in getattr(self, "running", []):
            span = Span(0, each.rows.length)
            wanted = [part[:, :, : span.stop] for part in each.wanted]
            assert not span.stop or same(each.rows.read(span), wanted)

    def teardown(self) -> None:
        for each in getattr(self, "running", []):
            each.rows.release()
        while getattr(self, "kept", []):
            self._evict()
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_blocks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_blocks_that_follow_one_another_are_views() -> None:
    pool = pool_of(6, 4)
    rows = Rows(pool, 10)
    rows.write(Span(0, 10), numbers(10, 1))
    for layer in range(GEOMETRY.num_layers):
        for part, plane in zip(rows.whole(layer, 0, 10), pool.layers[layer], strict=True):
            assert part.untyped_storage().data_ptr() == plane.untyped_storage().data_ptr()


def test_a_sequence_grows_in_place_while_the_pool_has_room() -> None:
    pool = pool_of(64, 4)
    first, second = (Rows(pool, 4) for _ in range(2))
    for num_rows in range(8, 60, 4):
        first.make_room(num_rows)
        second.make_room(num_rows)
    assert first.num_runs == second.num_runs == 1


def test_rows_are_turned_in_place_and_in_pieces_wherever_they_lie() -> None:
    pool = pool_of(num_blocks=200, block_size=4)
    pool.hold(np.arange(0, 40, 2))  # pieces first, then one long run
    rows = Rows(pool, 500)
    rows.write(Span(0, 500), kv := numbers(500, seed=3))
    lengths: list[int] = []

    def change(parts: list[torch.Tensor]) -> None:
        lengths.append(parts[0].shape[2])
        for part in parts:
            part.neg_()

    rows.turn(Span(10, 490), change)
    assert sum(lengths) == 480 and max(lengths) <= TURNED_AT_ONCE
    for part in kv:
        part[:, :, 10:490].neg_()
    assert same(rows.read(Span(0, 500)), kv)


def test_the_largest_gaps_are_taken_first() -> None:
    pool = pool_of(8, 1)
    pool.hold(np.array([1, 4]))
    assert pool.take(2).tolist() == [5, 6]
    assert pool.take(3).tolist() == [2, 3, 0]


def test_running_out_is_said_and_takes_nothing() -> None:
    pool = pool_of(3, 4)
    rows = Rows(pool, 5)
    with pytest.raises(KVBoostError, match=r"2 blocks of K/V are needed, 1 of 3 are free"):
        rows.make_room(13)
    with pytest.raises(KVBoostError):
        Rows(pool, 20, rows.runs(Span(0, 5)))
    assert pool.num_free == 1


def test_rows_that_others_hold_are_no_room() -> None:
    pool = pool_of(num_blocks=10, block_size=4)
    first, second = Rows(pool, 8), Rows(pool, 12)
    assert pool.room([]) == pool.room([(first, 8)]) == 20
    assert pool.room([(first, 16)]) == 12
    assert pool.room([(first, 8)], leaving=[second]) == 32
    third = Rows(pool, 16, prefix=first.runs(Span(0, 4)))
    assert pool.room([], leaving=[first]) == 40 - 4 - 12 - 12
    elsewhere = private_rows(pool.geometry, 100, pool.device)
    assert pool.room([(elsewhere, 500)], leaving=[elsewhere, third]) == 20


def test_nothing_is_evicted_for_rows_that_cannot_be_had() -> None:
    pool = pool_of(num_blocks=10, block_size=4)
    asked: list[int] = []
    pool.evict = lambda num_bytes: bool(asked.append(num_bytes))
    pool.keep([(16, 40)])
    held = Rows(pool, 8)
    with pytest.raises(KVBoostError, match="blocks"):
        Rows(pool, 36)
    assert asked == []
    with pytest.raises(KVBoostError, match="blocks"):  # here it is the chunks that stay
        Rows(pool, 32)
    assert asked == [6 * pool.block_bytes]
    held.release()


def test_a_block_cannot_be_released_twice() -> None:
    pool = pool_of(3, 4)
    blocks = pool.take(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often than held"):
        pool.release(blocks)


def test_rows_that_are_dropped_go_back_to_the_pool() -> None:
    pool = pool_of(3, 4)
    rows = Rows(pool, 5)
    assert pool.num_free == 1
    del rows
    assert pool.num_free == 3


def test_shared_rows_are_not_copied_and_outlive_their_owner() -> None:
    pool = pool_of(8, 4)
    owner = Rows(pool, 12)
    owner.write(Span(0, 7), numbers(7, 1))
    reader = Rows(pool, 8, owner.runs(Span(0, 6)))
    before = [part.clone() for part in reader.read(Span(0, 6))]
    owner.write(Span(7, 9), numbers(2, 2))
    reader.write(Span(6, 8), numbers(2, 3))
    assert pool.stats()["shared_blocks"] == 2 and pool.stats()["used_blocks"] == 4
    owner.release()
    assert same(reader.read(Span(0, 6)), before)
    assert pool.stats()["used_blocks"] == 3
