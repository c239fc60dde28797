"""Attention over keys in several parts, joined by the weight of their softmax sums (CPU)."""

from __future__ import annotations

from typing import TypeAlias

import torch

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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> Part:
    """Causal attention of the last tokens over all rows, without a mask.

    Rows before the first query are seen by all queries; among themselves the queries are causal.
    """
    num_past = key.shape[2] - query.shape[2]
    if query.shape[2] == 1:
        return attend(query, key, value, scale)
    own = _flash(query, key[:, :, num_past:], value[:, :, num_past:], 0.0, True, scale=scale)  # noqa: FBT003
    if num_past == 0:
        return own[0], own[1]
    past = attend(query, key[:, :, :num_past], value[:, :, :num_past], scale)
    return join(past, own), torch.logaddexp(past[1], own[1])


def join(first: Part, second: Part) -> torch.Tensor:
    """The output of attention to two parts as if they were one, in single precision."""
    (one, one_total), (other, other_total) = first, second
    weight = torch.sigmoid(other_total - one_total)[..., None]
    return torch.lerp(one.float(), other.float(), weight)
