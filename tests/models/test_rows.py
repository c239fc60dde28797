"""Rows that requests share: how many, and what stays where."""

from __future__ import annotations

import torch

from fakes import GEOMETRY
from kvboost.core import Span
from kvboost.models.rows import Rows
from kvboost.models.slots import SlotCache


def filled(num_rows: int, capacity: int, value: float) -> Rows:
    slots = SlotCache(GEOMETRY, capacity, torch.device("cpu"))
    kv = [part[:, :, :num_rows].clone().fill_(value) for part in slots.read(Span(0, num_rows))]
    slots.write(Span(0, num_rows), kv)
    return Rows(slots)


def values(rows: Rows, span: Span) -> set[float]:
    return {value for part in rows.read(span) for value in part.unique().tolist()}


def test_more_rows_can_be_shared_as_long_as_all_lie_in_one_buffer() -> None:
    rows = filled(600, 1000, 3.0)
    assert rows.num_shareable == 600
    early, late = rows.share(128), rows.share(512)
    assert (early.num_rows, late.num_rows, rows.num_shared, rows.length) == (128, 512, 512, 600)
    assert rows.share(64) is rows.share(64)
    assert early.buffers() == late.buffers() == rows.buffers()
    assert values(rows, Span(100, 600)) == {3.0}
    rows.own.make_room(600)
    assert rows.num_shareable == 512 and rows.share(544) is late
    assert rows.length == 600 and values(rows, Span(0, 600)) == {3.0}


def test_what_is_exact_stays_so_when_the_beginning_is_shared() -> None:
    rows = filled(260, 300, 3.0)
    rows.exact_stop = 250
    shared = rows.share(256)
    assert (rows.length, rows.exact_stop) == (260, 250)
    assert Rows(rows.own.like(4), shared).share(128).num_rows == 128
