"""Rows in blocks: whatever is written, shared and given back, each request has its own rows."""

from __future__ import annotations

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
from kvboost.models.paged import BlockPool, PagedCache
from kvboost.models.rows import Rows
from kvboost.models.slots import RowCache, SlotCache

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


def compute(cache: RowCache, kv: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a forward does with a cache; what each layer's attention gets."""
    planes = {
        plane: part[place][None]
        for group, part in zip(GEOMETRY.groups, kv, strict=True)
        for place, plane in enumerate(group.planes)
    }
    return [
        cache.layers[layer].update(planes[2 * layer], planes[2 * layer + 1])
        for layer in range(GEOMETRY.num_layers)
    ]


def row_of(place: int, seed: int) -> list[torch.Tensor]:
    return [part[:, :, place : place + 1] for part in numbers(50, seed)]


def append_one_each(caches: list[PagedCache], seed: int) -> None:
    """What a step does for requests with few rows."""
    for cache in caches:
        cache.make_room(cache.length + 1)
    write = caches[0].pool.writer(caches)
    planes = {
        plane: part[place][None, :, : len(caches)]
        for group, part in zip(GEOMETRY.groups, numbers(50, seed), strict=True)
        for place, plane in enumerate(group.planes)
    }
    for layer in range(GEOMETRY.num_layers):
        write(layer, (planes[2 * layer], planes[2 * layer + 1]))
    for cache in caches:
        cache.length += 1


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Request:
    """A request in blocks, and the same in a buffer of its own that shares nothing."""

    def __init__(self, rows: Rows, most: int) -> None:
        self.rows, self.most = rows, most
        self.plain = SlotCache(GEOMETRY, MOST_ROWS, CPU)
        if rows.shared is not None:
            span = Span(0, rows.num_shared)
            self.plain.write(span, rows.shared.read(span))

    def write(self, span: Span, seed: int) -> None:
        kv = numbers(len(span), seed)
        self.rows.write(span, kv)
        skipped = max(0, self.rows.num_shared - span.start)
        if skipped < len(span):
            own = [part[:, :, skipped:] for part in kv]
            self.plain.write(Span(span.start + skipped, span.stop), own)

    def compute(self, positions: list[int] | None, count: int, seed: int) -> None:
        before = self.rows.num_shared
        if positions is not None:
            self.rows.own.scatter([place - before for place in positions])
            self.plain.scatter(positions)
        kv = numbers(count, seed)
        ours, plain = compute(self.rows.own, kv), compute(self.plain, kv)
        for seen, wanted in zip(ours, plain, strict=True):
            assert same(list(seen), [part[:, :, before:] for part in wanted])

    @property
    def blocks(self) -> list[int]:
        shared = [] if self.rows.shared is None else self.rows.shared.slots._blocks
        return [*shared, *self.rows.own._blocks]


class Traffic(RuleBasedStateMachine):
    """Requests come as the batch lets them in: then none of them may ever run out of blocks."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize(num_blocks=st.integers(1, 30), block_size=st.integers(1, 7))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = pool_of(num_blocks, block_size)
        self.running: list[Request] = []
        self.seed = 0

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed

    def _may_join(self, most: int) -> bool:
        if not self.running:
            return most <= self.pool.num_tokens
        return most <= self.pool.room([(each.rows, each.most) for each in self.running])

    def _join(self, rows: Rows, most: int) -> Request:
        self.running.append(Request(rows, most))
        return self.running[-1]

    @rule(target=requests, most=st.integers(1, MOST_ROWS), given=st.integers(0, MOST_ROWS))
    def join(self, most: int, given: int) -> object:
        if not self._may_join(most):
            return multiple()
        return self._join(Rows(self.pool.cache(min(given, most))), most)

    @rule(target=requests, owner=requests, most=st.integers(2, MOST_ROWS), data=st.data())
    def join_on_shared_rows(self, owner: Request, most: int, data: st.DataObject) -> object:
        longest = min(owner.rows.length, most - 1)
        if longest == 0 or not self._may_join(most):
            return multiple()
        shared = owner.rows.share(data.draw(st.integers(1, longest)))
        given = data.draw(st.integers(0, most - shared.num_rows))
        return self._join(Rows(self.pool.cache(given), shared), most)

    @rule(request=requests, data=st.data())
    def write(self, request: Request, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, min(request.rows.length, request.most - 1)))
        stop = data.draw(st.integers(start + 1, request.most))
        request.write(Span(start, stop), self._next_seed())

    @rule(request=requests, count=st.integers(1, 20))
    def append(self, request: Request, count: int) -> None:
        count = min(count, request.most - request.rows.length)
        if count:
            request.compute(None, count, self._next_seed())

    @rule()
    def append_together(self) -> None:
        growing = [each for each in self.running if each.rows.length < each.most]
        if growing:
            append_one_each([each.rows.own for each in growing], self._next_seed())
            for place, request in enumerate(growing):
                compute(request.plain, row_of(place, self.seed))

    @rule(request=requests, data=st.data())
    def compute_again(self, request: Request, data: st.DataObject) -> None:
        own = range(request.rows.num_shared, request.rows.length)
        if own:
            positions = data.draw(st.lists(st.sampled_from(own), min_size=1, unique=True))
            request.compute(positions, len(positions), self._next_seed())

    @rule(request=consumes(requests))
    def leave(self, request: Request) -> None:
        self.running.remove(request)
        request.rows.close()

    @invariant()
    def everyone_reads_what_it_wrote(self) -> None:
        for request in getattr(self, "running", []):
            span = Span(0, request.rows.length)
            assert request.rows.length == request.plain.length
            assert same(request.rows.read(span), request.plain.read(span))

    @invariant()
    def no_block_is_lost_or_written_by_two(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = {block for request in self.running for block in request.blocks}
        assert {int(b) for b in self.pool._holders.nonzero()[0]} == held
        assert self.pool.stats()["used_blocks"] == len(held)
        private = [b for r in self.running for b in r.rows.own._blocks[r.rows.own._may_share :]]
        assert len(private) == len(set(private))
        assert all(self.pool._holders[block] == 1 for block in private)

    def teardown(self) -> None:
        for request in getattr(self, "running", []):
            request.rows.close()
        if hasattr(self, "pool"):
            assert self.pool.stats()["free_blocks"] == self.pool.num_blocks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_blocks_that_follow_one_another_are_views() -> None:
    pool = pool_of(6, 4)
    cache = pool.cache(10)
    cache.write(Span(0, 10), numbers(10, 1))
    for layer in range(GEOMETRY.num_layers):
        for rows, plane in zip(cache.layer_rows(layer, 10), pool.layers[layer], strict=True):
            assert rows.untyped_storage().data_ptr() == plane.untyped_storage().data_ptr()


def test_a_cache_that_grows_takes_the_next_block_if_it_can() -> None:
    pool = pool_of(8, 4)
    first = pool.cache(4)
    first.make_room(9)
    assert first._blocks == [0, 1, 2]
    second = pool.cache(1)
    first.make_room(13)
    assert (second._blocks, first._blocks) == ([3], [0, 1, 2, 4])


def test_a_run_of_free_blocks_is_preferred_to_pieces() -> None:
    pool = pool_of(8, 1)
    caches = [pool.cache(1) for _ in range(5)]
    for place in (0, 2, 3):
        caches[place].release()
    assert pool.take(2) == [2, 3]
    assert pool.take(4) == [0, 5, 6, 7]


def test_running_out_is_said_and_takes_nothing() -> None:
    pool = pool_of(3, 4)
    cache = pool.cache(5)
    with pytest.raises(KVBoostError, match=r"2 blocks of K/V are needed, 1 of 3 are free"):
        cache.make_room(13)
    assert pool.stats()["free_blocks"] == 1


def test_a_block_cannot_be_released_twice() -> None:
    cache = pool_of(3, 4).cache(5)
    cache.release()
    with pytest.raises(ValueError, match="more often than held"):
        cache.release()


def test_a_partly_shared_block_is_copied_when_its_owner_goes_on() -> None:
    pool = pool_of(8, 4)
    owner = Rows(pool.cache(12))
    owner.write(Span(0, 7), numbers(7, 1))
    reader = Rows(pool.cache(2), owner.share(6))
    before = [part.clone() for part in reader.read(Span(0, 6))]
    assert pool.stats()["copied_blocks"] == 0
    owner.write(Span(7, 8), numbers(1, 2))
    owner.write(Span(8, 9), numbers(1, 3))
    stats = pool.stats()
    assert (stats["copied_blocks"], stats["shared_blocks"], stats["saved_blocks"]) == (1, 2, 2)
    owner.close()
    assert same(reader.read(Span(0, 6)), before)
    assert pool.stats()["used_blocks"] == 3


@pytest.mark.parametrize(("num_blocks", "fits"), [(3, False), (4, True)])
def test_a_request_waits_until_there_is_room_for_the_copy_of_a_shared_block(
    num_blocks: int, fits: bool
) -> None:
    pool = pool_of(num_blocks, 4)
    owner = Rows(pool.cache(3))
    owner.write(Span(0, 3), numbers(3, 1))
    assert (pool.room([(owner, 4)]) >= 8) is fits
    if fits:
        reader = Rows(pool.cache(0), owner.share(3))
        reader.write(Span(3, 8), numbers(5, 2))
        owner.write(Span(3, 4), numbers(1, 3))
        assert pool.stats()["free_blocks"] == 0


def test_rows_after_shared_ones_may_need_a_block_more_than_their_number_says() -> None:
    pool = pool_of(6, 4)
    owner = Rows(pool.cache(6))
    owner.write(Span(0, 6), numbers(6, 1))
    reader = Rows(pool.cache(1), owner.share(6))
    members = [(owner, 9), (reader, 7)]  # 2 shared, 2 for three rows of the owner, 1 (at most 2)
    assert pool.room(members[:1]) == 4
    assert pool.room(members) <= 0


def test_a_partly_shared_block_is_copied_when_rows_in_it_are_computed_again() -> None:
    pool = pool_of(8, 4)
    owner = Rows(pool.cache(12))
    owner.write(Span(0, 11), numbers(11, 1))
    owner.share(6)
    compute(owner.own, numbers(1, 2))
    assert pool.stats()["copied_blocks"] == 0
    owner.own.scatter([0])
    compute(owner.own, numbers(1, 3))
    assert pool.stats()["copied_blocks"] == 1


def test_no_block_is_copied_where_sharing_ends_at_its_border() -> None:
    pool = pool_of(8, 4)
    owner = Rows(pool.cache(12))
    owner.write(Span(0, 9), numbers(9, 1))
    Rows(pool.cache(2), owner.share(8))
    owner.write(Span(9, 12), numbers(3, 2))
    assert pool.stats()["copied_blocks"] == 0


def test_blocks_that_several_share_are_counted_once() -> None:
    pool = pool_of(12, 4)
    owner = Rows(pool.cache(16))
    owner.write(Span(0, 16), numbers(16, 1))
    first = Rows(pool.cache(0), owner.share(8))
    second = Rows(pool.cache(0), owner.share(16))
    running = [(owner, 16), (first, 12), (second, 20)]
    assert pool.stats()["used_blocks"] == 4
    assert pool.room(running) == 20


def test_rows_at_another_place_of_their_block_cannot_be_shared_on() -> None:
    pool = pool_of(12, 4)
    owner = Rows(pool.cache(8))
    owner.write(Span(0, 8), numbers(8, 1))
    for num_shared, num_shareable in ((6, 6), (4, 7)):
        reader = Rows(pool.cache(3), owner.share(8).head(num_shared))
        reader.write(Span(num_shared, num_shared + 3), numbers(3, 2))
        assert reader.num_shareable == num_shareable


def test_blocks_come_without_what_was_in_them() -> None:
    pool = pool_of(2, 4)
    cache = pool.cache(8)
    cache.write(Span(0, 8), [torch.full_like(part, torch.nan) for part in numbers(8, 1)])
    cache.release()
    assert all(bool((part == 0).all()) for part in pool.cache(8).read(Span(0, 8)))


@pytest.mark.parametrize("kind", ["blocks", "pieces"])
def test_few_rows_of_several_are_written_and_read_together(kind: str) -> None:
    pool = pool_of(40, 3)
    if kind == "pieces":  # no two free blocks follow one another
        pool.hold(range(0, 40, 2))
    caches = []
    for seed, length in enumerate([2, 7, 0, 4]):
        caches.append(pool.cache(7))
        caches[-1].write(Span(0, length), numbers(length, seed))
    chosen = [caches[place] for place in (0, 1, 3)]
    before = [[part.clone() for part in cache.read(Span(0, cache.length))] for cache in chosen]
    append_one_each(chosen, 9)
    for place, (cache, rows) in enumerate(zip(chosen, before, strict=True)):
        wanted = [torch.cat(pair, 2) for pair in zip(rows, row_of(place, 9), strict=True)]
        assert same(cache.read(Span(0, cache.length)), wanted)
    read = pool.reader(chosen, 8)
    for layer in range(GEOMETRY.num_layers):
        for place, cache in enumerate(chosen):
            rows = cache.layer_rows(layer, cache.length)
            for all_rows, own in zip(read(layer), rows, strict=True):
                assert all_rows.shape[2] == 8
                assert torch.equal(all_rows[place : place + 1, :, : cache.length], own)
                assert bool(all_rows.isfinite().all())
    assert (kind == "pieces") == any(cache._first is None for cache in caches)
