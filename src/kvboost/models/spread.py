"""Correction of moved rows between recomputed ones.

When a text moves to another context, the K/V of neighbouring tokens changes alike: on trained
models a third to a half of the change of a row is predicted by rows up to a hundred tokens away
(docs/research-log.md). So a forward that computes some rows of a moved text again also learns how
the rows between them have changed. The prediction is the best linear one (kriging) for a
correlation that falls with distance; it costs one small matrix product a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvboost.core import Span
from kvboost.models.pool import BlockPool, KeyValue
from kvboost.models.upload import PerDevice, sent, upload

# Correlation of the change of two rows by distance in tokens: a part that the whole text shares,
# one that fades over about a hundred tokens, one that only close neighbours share. What is left
# to 1 is each row's own.
SHARED, SLOW, FAST = 0.22, 0.20, 0.18
SLOW_TOKENS, FAST_TOKENS = 100.0, 3.0

LONGEST_PATCH = 384  # tokens that are corrected together: keeps the cost linear in the text
PADDED_TOGETHER = 24  # patches


@dataclass(frozen=True)
class Patch:
    """Rows [start, stop), and the weights by which they follow recomputed ones."""

    start: int
    stop: int
    rows: torch.Tensor  # recomputed ones, counted from `start`
    sources: torch.Tensor  # index of these among all recomputed rows
    weights: torch.Tensor  # [stop - start, len(rows)]


def patches(
    runs: Iterable[Span], recomputed: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Patch]:
    """For each run of moved rows, how to correct it from its recomputed rows (sorted positions)."""
    computed = torch.tensor(recomputed)
    made = []
    for span in _pieces(runs):
        first, last = torch.searchsorted(computed, torch.tensor([span.start, span.stop])).tolist()
        if last == first:
            continue
        rows, own = torch.arange(span.start, span.stop), computed[first:last]
        among = _correlation(own, own)
        among.diagonal().fill_(1.0)
        weights = torch.linalg.solve(among, _correlation(own, rows)).T
        made.append(
            Patch(
                span.start,
                span.stop,
                (own - span.start).to(device),
                torch.arange(first, last, device=device),
                weights.to(device, dtype),
            )
        )
    return made


def apply(patch: Patch, stored: torch.Tensor, fresh: torch.Tensor) -> None:
    """Correct the patch's rows, `stored` [batch, heads, rows, head_dim], by how `fresh` differs.

    `fresh` holds all recomputed rows, of which the patch knows its own.
    """
    change = fresh.index_select(2, patch.sources) - stored.index_select(2, patch.rows)
    stored += patch.weights @ change


class Padded:
    """Patches of one size, corrected by one product: on GPUs launches cost more than numbers."""

    def __init__(
        self, patches: Sequence[Patch], slot_mapping: npt.NDArray[np.int64], pool: BlockPool
    ) -> None:
        """Patches are in host memory; `slot_mapping` has the rows of the pool by position."""
        self._pool = pool
        length = max(patch.stop - patch.start for patch in patches)
        count = max(len(patch.rows) for patch in patches)
        weights = torch.zeros(len(patches), length, count, dtype=pool.dtype)
        rows = np.full((len(patches), length), pool.blank)
        own = np.empty((len(patches), count), np.int64)
        sources = np.empty_like(own)
        for number, patch in enumerate(patches):
            here = slot_mapping[patch.start : patch.stop]
            weights[number, : len(here), : len(patch.rows)] = patch.weights
            rows[number, : len(here)] = here
            # Padded by rows of its own, of weight 0: so that overflows in other rows do not spread.
            padding = 0, count - len(patch.rows)
            own[number] = np.pad(here[patch.rows.numpy()], padding, "edge")
            sources[number] = np.pad(patch.sources.numpy(), padding, "edge")
        flat = (each.ravel() for each in (rows, own, sources))
        arrived = sent(weights, pool.device), *upload(pool.device, *flat)
        self._numbers = PerDevice(pool.device, *arrived)

    def apply(self, layer: int, fresh: KeyValue) -> None:
        """Correct all rows of a layer; the blank one, which pads, stays zero."""
        weights, rows, own, sources = self._numbers.on(fresh[0].device)
        num_patches, _, count = weights.shape
        for plane, new in zip(self._pool.layers[layer], fresh, strict=True):
            change = new.index_select(2, sources) - plane.index_select(2, own)
            change = weights @ change.view(-1, num_patches, count, change.shape[-1])
            plane.index_add_(2, rows, change.view(1, change.shape[0], -1, change.shape[-1]))
            plane[:, :, self._pool.blank] = 0


def padded(
    patches: Sequence[Patch], slot_mapping: npt.NDArray[np.int64], pool: BlockPool
) -> list[Padded]:
    """Patches in groups: one for all would copy all moved rows of a layer at once."""
    starts = range(0, len(patches), PADDED_TOGETHER)
    groups = (patches[start : start + PADDED_TOGETHER] for start in starts)
    return [Padded(group, slot_mapping, pool) for group in groups]


def _pieces(runs: Iterable[Span]) -> Iterable[Span]:
    for run in runs:
        count = -(-len(run) // LONGEST_PATCH)
        for piece in range(count):
            start, stop = (run.start + len(run) * end // count for end in (piece, piece + 1))
            yield Span(start, stop)


def _correlation(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    distance = (left[:, None] - right[None, :]).abs().double()
    slow = SLOW * torch.exp(-distance / SLOW_TOKENS)
    return SHARED + slow + FAST * torch.exp(-distance / FAST_TOKENS)
