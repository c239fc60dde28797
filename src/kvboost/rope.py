"""Move stored keys to new positions. Pure tensor maths: which dims turn is measured elsewhere."""

from __future__ import annotations

import torch

from kvboost.core import Rotation


def rotate(k: torch.Tensor, rotation: Rotation, delta: int) -> torch.Tensor:
    """Turn `k` [..., head_dim] by `delta` positions; computed in fp32, returned in k's dtype.

    Rotations compose: stored K already carries R(old), so one turn by (new - old) moves it. The
    turn has unit scale: what YaRN multiplies K by was applied when K was computed.
    """
    if delta == 0:
        return k
    freq = torch.tensor(rotation.inv_freq, dtype=torch.float64, device=k.device)
    angle = freq * delta
    cos, sin = angle.cos().float(), angle.sin().float()
    moved = k.float().clone()
    first, second = _pairs(rotation)
    a, b = moved[..., first].clone(), moved[..., second].clone()
    moved[..., first] = a * cos - b * sin
    moved[..., second] = b * cos + a * sin
    return moved.to(k.dtype)


def _pairs(rotation: Rotation) -> tuple[slice, slice]:
    """The two halves of every rotated pair of dims."""
    start, half = rotation.offset, len(rotation.inv_freq)
    if rotation.layout == "half":
        return slice(start, start + half), slice(start + half, start + 2 * half)
    return slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
