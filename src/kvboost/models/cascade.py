"""Attention over K/V in several parts, joined by their softmax sums (CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvboost.models.pool import KeyValue
from kvboost.models.rows import Past

if TYPE_CHECKING:
    from kvboost.models.packed import Segment

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001

Part: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""An output [batch, heads, queries, head_dim] and the logarithm of its softmax sum."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    *,
    mask: torch.Tensor | None = None,
) -> Part:
    """Attention of all queries to all keys of one part that `mask` does not hide."""
    # The queries that share a K/V head become rows of one product, so that keys are read once.
    batch, num_heads, num_queries, head_dim = query.shape
    folded = (batch, key.shape[1], num_queries * num_heads // key.shape[1], head_dim)
    output, total = _flash(query.reshape(folded), key, value, 0.0, scale=scale, attn_mask=mask)
    return output.reshape(query.shape), total.reshape(query.shape[:-1])


def attend_appended(
    query: torch.Tensor, past: Sequence[KeyValue], own: KeyValue, scale: float | None
) -> Part:
    """Causal attention of the last tokens to their own rows and to all rows before these.

    No mask is written out: `past` is seen by all queries.
    """
    output, total, *_ = _flash(query, *own, 0.0, True, scale=scale)  # noqa: FBT003
    parts = [attend(query, *each, scale) for each in past if each[0].shape[2]]
    return join([*parts, (output, total)])


def join(parts: Sequence[Part]) -> Part:
    """Attention to several parts as if they were one; in single precision, if there are several."""
    output, total = parts[0]
    for other, other_total in parts[1:]:
        weight = torch.sigmoid(other_total - total)[..., None]
        output = torch.lerp(output.float(), other.float(), weight)
        total = torch.logaddexp(total, other_total)
    return output, total


class Together:
    """Sequences that attend together: to the rows they share, if any, and each to its own."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._first, self._one = segments[0].start, segments[0]
        small = [segment for segment in segments if segment.is_small]
        self._small = SmallAttention(small) if small else None
        self._others = segments[len(small) :]
        self._num_small = len(small)
        self._shared = Past(self._one.rows, 0, self._one.num_before)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of these sequences [1, tokens, heads, head_dim]."""
        parts = []
        if self._small is not None:
            parts.append(self._small.attend(layer, query[:, :, : self._num_small], scale))
        for segment in self._others:
            part = query[:, :, segment.start - self._first : segment.stop - self._first]
            parts.append(segment.attend(layer, part, scale))
        output, total = parts[0]
        if len(parts) > 1:
            output = torch.cat([output.float() for output, _ in parts], dim=2)
            total = torch.cat([total for _, total in parts], dim=2)
        if self._one.num_before:
            shared = [attend(query, *each, scale) for each in self._shared.layer(layer)]
            output, _ = join([*shared, (output, total)])
        return output.to(query.dtype).transpose(1, 2)


class SmallAttention:
    """One token of each sequence on its own rows, in one kernel."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._pool, device = segments[0].rows.pool, segments[0].rows.device
        lengths = [segment.num_visible - segment.num_before for segment in segments]
        longest, dtype = max(lengths), self._pool.dtype
        ends = torch.tensor(lengths, device=device)[:, None]
        is_hidden = torch.arange(longest, device=device) >= ends
        mappings = [
            each.rows.slot_mapping(each.num_before, each.num_before + longest) for each in segments
        ]
        # Masked rows must be finite, too; those after the last one may hold anything.
        self._slot_mapping = torch.from_numpy(np.stack(mappings)).masked_fill_(
            is_hidden, self._pool.blank
        )
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
        self._mask = mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None, None]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> Part:
        """Attention of a token each [1, heads, tokens, head_dim]."""
        key, value = self._pool.gather(layer, self._slot_mapping)
        output, total = attend(query.transpose(0, 2), key, value, scale, mask=self._mask)
        return output.transpose(0, 2), total.transpose(0, 2)
