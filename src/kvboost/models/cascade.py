"""Attention over keys in several parts, joined by the weight of their softmax sums (CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from kvboost.models.pool import KeyValue

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
    if query.shape[2] == 1:
        last = attend(query, *own, scale)
    else:
        output, total, *_ = _flash(query, *own, 0.0, True, scale=scale)  # noqa: FBT003
        last = output, total
    return join([*(attend(query, *each, scale) for each in past if each[0].shape[2]), last])


def join(parts: Sequence[Part]) -> Part:
    """Attention to several parts as if they were one; in single precision, if there are several."""
    output, total = parts[0]
    for other, other_total in parts[1:]:
        weight = torch.sigmoid(other_total - total)[..., None]
        output = torch.lerp(output.float(), other.float(), weight)
        total = torch.logaddexp(total, other_total)
    return output, total
