"""Attention of all sequences of a forward in one kernel a layer, on the rows of the pool (CUDA).

A sequence's rows lie in runs. Flash attention for sequences of various lengths takes the first row
and the length of each, so nothing is copied: one call for the runs that tokens stand in, one for
all runs before these. What several sequences share is one run there, read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.core import Span
from kvboost.models.kernels import HALVES, WIDEST_HEAD
from kvboost.models.pool import BlockPool, Blocks, Run
from kvboost.models.upload import PerDevice, upload

if TYPE_CHECKING:
    from kvboost.models.packed import Segment

MOST_RUNS = 16  # of a sequence; with more, its rows are gathered before attention
MOST_JOINED = 4096  # outputs of one sequence's tokens, one for each run; 16 KB each in an 8B model

_flash: Any = torch.ops.aten._flash_attention_forward  # noqa: SLF001


def fits(pool: BlockPool) -> bool:
    """Whether the kernel takes K/V of this kind."""
    widths = {(key.shape[-1], value.shape[-1]) for key, value in pool.layers.values()}
    is_even = all(key == value <= WIDEST_HEAD and key % 8 == 0 for key, value in widths)
    return pool.device.type == "cuda" and pool.dtype in HALVES and is_even


class Varlen:
    """Appended tokens of sequences that are neighbours in the packed row."""

    def __init__(self, segments: Sequence[Segment], window: int | None) -> None:
        """`window`: how many rows a token sees, itself included; None: all before it."""
        self._pool, self._window = segments[0].rows.pool, window
        first = segments[0].start
        queries: list[Blocks] = []  # by the run they are in
        own: list[Run] = []
        past: dict[Run, list[Blocks]] = {}  # runs before these, and the queries that see them
        for segment in segments:
            for start, stop, run, before in _pieces(segment, window):
                queries.append(np.arange(start - first, stop - first))
                own.append(run)
                for each in before:
                    past.setdefault(each, []).append(queries[-1])
        self._own, self._past = _Call(queries, own, self._pool), None
        if past:
            seen_by = [np.concatenate(each) for each in past.values()]
            self._past = _Call(seen_by, list(past), self._pool)
            self._set_table(segments[-1].stop - first, np.concatenate(seen_by))

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of these sequences [1, tokens, heads, head_dim]."""
        tokens = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
        planes = [plane[0].transpose(0, 1) for plane in self._pool.layers[layer]]
        left = -1 if self._window is None else self._window - 1
        output, total = self._own.run(tokens, planes, scale, is_causal=True, left=left)
        if self._past is None:
            return output[None]
        seen_by, table, blank = self._numbers.on(query.device)
        queries = tokens.index_select(0, seen_by)
        others = self._past.run(queries, planes, scale, is_causal=False)
        # Joined by the weight of their softmax sums.
        outputs, totals = torch.cat([output, others[0]]), torch.cat([total, others[1]], dim=1)
        weights = totals[:, table] + blank
        shares = weights.softmax(dim=-1)[..., None]  # [heads, tokens, parts, 1]
        parts = outputs[table].permute(2, 0, 1, 3)
        joined: torch.Tensor = (parts * shares).sum(dim=2).to(query.dtype)
        return joined.transpose(0, 1)[None]

    def _set_table(self, num_tokens: int, seen_by: Blocks) -> None:
        """Which outputs belong to a token: its own first, then those of runs before."""
        counts = np.bincount(seen_by, minlength=num_tokens)
        shape = num_tokens, 1 + int(counts.max())
        table = np.zeros(shape, np.int64)
        table[:, 0] = np.arange(num_tokens)
        order = np.argsort(seen_by, kind="stable")
        rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        table[seen_by[order], 1 + rank] = num_tokens + order
        is_blank = (np.arange(shape[1]) > counts[:, None]).astype(np.int64)
        flat = table.ravel(), is_blank.ravel()
        device = self._pool.device
        first, outputs, hidden = upload(device, seen_by, *flat)
        blank = torch.zeros(shape, device=device)
        blank.masked_fill_(hidden.view(shape).bool(), -torch.inf)
        self._numbers = PerDevice(device, first, outputs.view(shape), blank)


class _Call:
    """The arguments of one kernel: which queries see which run of rows."""

    def __init__(self, queries: Sequence[Blocks], runs: Sequence[Run], pool: BlockPool) -> None:
        counts = [len(each) for each in queries]
        starts = [0, *accumulate(counts)]
        lengths = [stop - start for start, stop in runs]
        self._longest = max(counts), max(lengths)
        bounds = upload(pool.device, starts, [*(start for start, _ in runs), 0], lengths)
        self._bounds = PerDevice(pool.device, *(each.int() for each in bounds))

    def run(
        self,
        query: torch.Tensor,
        planes: Sequence[torch.Tensor],
        scale: float | None,
        *,
        is_causal: bool,
        left: int = -1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [queries, heads, head_dim] and its softmax sums [heads, queries]."""
        starts, firsts, lengths = self._bounds.on(query.device)
        output, total, *_ = _flash(
            query, *planes, starts, firsts, *self._longest, 0.0, is_causal, False,  # noqa: FBT003
            scale=scale, window_size_left=left, window_size_right=-1,  # 0 by `is_causal`
            seqused_k=lengths,
        )  # fmt: skip
        return output, total


def can_take(segment: Segment, pool: BlockPool, window: int | None) -> bool:
    """Whether a segment is appended to a few runs of the pool, none of them cut by a window."""
    if segment.scattered is not None or segment.rows.pool is not pool:
        return False
    num_runs = segment.rows.num_runs
    if num_runs > MOST_RUNS or num_runs * len(segment.tokens) > MOST_JOINED:
        return False
    return window is None or all(
        stop - start == 1 or not before for start, stop, _, before in _pieces(segment, window)
    )


def _pieces(segment: Segment, window: int | None) -> list[tuple[int, int, Run, list[Run]]]:
    """Queries of a segment by the run they are in, that run's rows so far, and runs before."""
    found: list[tuple[int, int, Run, list[Run]]] = []
    before: list[tuple[int, int, int]] = []  # position of the first row, and the run
    first_row, first_own = 0, segment.rows.length
    for start, stop in segment.rows.runs(Span(0, segment.num_visible)):
        stop_row = first_row + stop - start
        low, high = max(first_own, first_row), stop_row
        if low < high:
            place = segment.start - first_own
            first_seen = 0 if window is None else low - window + 1
            seen = [
                (b - max(0, min(b - a, row + b - a - first_seen)), b)
                for row, a, b in before
                if row + b - a > first_seen
            ]
            found.append((low + place, high + place, (start, stop), seen))
        before.append((first_row, start, stop))
        first_row = stop_row
    return found
