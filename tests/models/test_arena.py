"""The arena: places in one buffer, given out, grown and given back."""

from __future__ import annotations

import torch

from fakes import GEOMETRY
from kvboost.core import Span
from kvboost.models.arena import SlotArena
from kvboost.models.pool import SlotPool
from kvboost.models.rows import Rows
from kvboost.models.slots import SlotCache

CPU = torch.device("cpu")


def filled(slots: SlotCache, num_rows: int, value: float) -> SlotCache:
    kv = [part[:, :, :num_rows].clone().fill_(value) for part in slots.read(Span(0, num_rows))]
    slots.write(Span(0, num_rows), kv)
    return slots


def values(rows: SlotCache | Rows, span: Span) -> set[float]:
    return {value for part in rows.read(span) for value in part.unique().tolist()}


def test_a_place_is_free_when_its_cache_is_gone_and_holds_nothing_of_it() -> None:
    arena = SlotArena(GEOMETRY, CPU)
    first, second = filled(arena.take(8), 8, torch.nan), filled(arena.take(8), 8, 2.0)
    place = first.place
    del first
    third = arena.take(8)
    assert third.place == place != second.place
    assert values(third, Span(0, arena.num_rows)) == {0.0}


def test_what_places_hold_outlives_growth_and_leaving() -> None:
    arena = SlotArena(GEOMETRY, CPU)
    users = [filled(arena.take(8), 8, float(number)) for number in range(5)]
    users[1].make_room(200)
    assert users[4].capacity >= 200
    users[2].make_room(arena.most_rows + 1)
    filled(arena.take(8), 8, 9.0)
    assert users[2].arena is None
    assert [values(user, Span(0, 8)) for user in users] == [{float(n)} for n in range(5)]


def test_more_rows_can_be_shared_as_long_as_all_lie_in_one_buffer() -> None:
    rows, pool = (
        Rows(filled(SlotCache(GEOMETRY, 1000, CPU), 600, 3.0)),
        SlotPool(GEOMETRY, 9999, CPU),
    )
    assert rows.num_shareable == 600
    early, late = rows.share(128, pool), rows.share(512, pool)
    assert (early.num_rows, late.num_rows, rows.num_shared, rows.length) == (128, 512, 512, 600)
    assert rows.share(64, pool) is rows.share(64, pool)
    assert early.buffers() == late.buffers() == rows.buffers()
    assert values(rows, Span(100, 600)) == {3.0}
    rows.own.make_room(600)
    assert rows.num_shareable == 512 and rows.share(544, pool) is late
    assert rows.length == 600 and values(rows, Span(0, 600)) == {3.0}


def test_what_is_left_as_own_goes_to_the_arena_if_it_will_be_little() -> None:
    rows, pool = (
        Rows(filled(SlotCache(GEOMETRY, 300, CPU), 260, 3.0)),
        SlotPool(GEOMETRY, 9999, CPU),
    )
    rows.exact_stop = 250
    rows.share(256, pool)
    assert rows.own.arena is not None and rows.num_shareable == 256
    assert (rows.length, rows.exact_stop) == (260, 250)
    assert values(rows, Span(0, 260)) == {3.0}
    assert Rows(pool.cache(4, on_shared=True), rows.shared).share(128, pool).num_rows == 128
