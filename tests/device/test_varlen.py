"""One kernel for several sequences, whose rows lie in several runs, against a mask written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from device.pretended import Device, DeviceTensor, pretended
from kvboost.core import KVGeometry, PlaneGroup, Span
from kvboost.models.packed import Segment
from kvboost.models.pool import BlockPool
from kvboost.models.rows import Rows
from kvboost.models.varlen import Varlen, can_take

pytestmark = pytest.mark.device

HEADS, DIMS, QUERY_HEADS = 2, 16, 4
GEOMETRY = KVGeometry(1, (PlaneGroup((0, 1), HEADS, DIMS),), "float16", 2)


def pool_on(device: Device) -> BlockPool:
    pool = BlockPool(GEOMETRY, 120, 4, torch.device("cuda:0"))
    chance = torch.Generator().manual_seed(0)
    for buffer in pool.buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=chance).half())
    return pool


def segment_of(pool: BlockPool, rows: Rows, num_past: int, num_new: int, start: int) -> Segment:
    rows.length = num_past
    segment = Segment(rows, [0] * num_new, range(num_past, num_past + num_new))
    segment.start, segment.stop = start, start + num_new
    return segment


def expected(segment: Segment, query: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of a segment's queries [heads, tokens, dims] to its rows by a mask."""
    slot_mapping = segment.rows.slot_mapping(0, segment.num_visible)
    key, value = (plane.held[0][:, slot_mapping].float() for plane in segment.rows.pool.layers[0])
    key, value = (part.repeat_interleave(QUERY_HEADS // HEADS, 0) for part in (key, value))
    positions = torch.tensor(list(segment.positions))[:, None]
    rows = torch.arange(segment.num_visible)
    seen = (rows <= positions) & (rows > positions - (window or segment.num_visible + 1))
    scores = query.float() @ key.mT * DIMS**-0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("window", [None, 1, 5, 9, 16, 30, 100])
def test_sequences_in_pieces_attend_as_by_a_mask(window: int | None) -> None:
    with pretended() as device:
        pool = pool_on(device)
        first = Rows(pool, 40)
        pool.hold(np.arange(60, 120, 2))  # what follows lies in pieces
        num_new = 1 if window else 6
        shared = first.runs(Span(0, 24))
        second, third = Rows(pool, 60, prefix=shared), Rows(pool, 44, prefix=shared)
        segments, start = [], 0
        for rows, num_past in ((first, 33), (second, 47), (third, 38)):
            segments.append(segment_of(pool, rows, num_past, num_new, start))
            start += num_new
        assert all(can_take(each, pool, window) for each in segments)
        assert max(each.rows.num_runs for each in segments) > 1
        query = torch.randn(1, QUERY_HEADS, start, DIMS).half()
        ours = Varlen(segments, window).attend(0, DeviceTensor(query, device), DIMS**-0.5)
    assert ours.shape == (1, start, QUERY_HEADS, DIMS)
    for each in segments:
        wanted = expected(each, query[0, :, each.start : each.stop], window)
        got = ours.held[0, each.start : each.stop].transpose(0, 1).float()
        torch.testing.assert_close(got, wanted, atol=3e-3, rtol=3e-3)


def test_a_window_over_runs_is_for_single_tokens_only() -> None:
    with pretended() as device:
        pool = pool_on(device)
        pool.hold(np.arange(0, 120, 2))
        rows = Rows(pool, 40)
        assert not can_take(segment_of(pool, rows, 30, 3, 0), pool, 9)
        assert can_take(segment_of(pool, rows, 30, 1, 0), pool, 9)
        assert not can_take(segment_of(pool, Rows(pool, 90), 70, 1, 0), pool, None)  # too many
