"""Rotation of stored keys to new positions. Which dims rotate is measured elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvboost.core import KVGeometry, Rotation

if TYPE_CHECKING:
    from kvboost.codecs.base import KV


def move(
    kv: KV, geometry: KVGeometry, rotations: Mapping[int, Rotation | None], delta: int
) -> None:
    """Rotate the K/V of some tokens in place, to `delta` positions further on."""
    if delta == 0:
        return
    for group, part in zip(geometry.groups, kv, strict=True):
        angles: dict[Rotation, tuple[torch.Tensor, torch.Tensor]] = {}
        for place, plane in enumerate(group.planes):
            rotation = rotations[plane]
            if rotation is None:
                continue
            if rotation not in angles:
                angles[rotation] = _angles(rotation, delta, part.device)
            part[place] = _turn(part[place], rotation, *angles[rotation])


def rotate(k: torch.Tensor, rotation: Rotation, delta: int) -> torch.Tensor:
    """Rotate `k` [..., head_dim] by `delta` positions; computed in fp32, returned in k's dtype.

    Rotations compose: stored K already carries R(old), so one rotation by (new - old) moves it. It
    has unit scale: what YaRN multiplies K by was applied when K was computed.
    """
    return k if delta == 0 else _turn(k, rotation, *_angles(rotation, delta, k.device))


def _angles(
    rotation: Rotation, delta: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.tensor(rotation.inv_freq, dtype=torch.float64) * delta
    cos, sin = torch.stack((angle.cos(), angle.sin())).float().to(device)
    return cos, sin


def _turn(
    k: torch.Tensor, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    moved = k.to(torch.float32, copy=True)
    first, second = _pairs(rotation)
    a, b = moved[..., first], moved[..., second]
    turned = (a * cos).addcmul_(b, sin, value=-1)
    moved[..., second] = (b * cos).addcmul_(a, sin)
    moved[..., first] = turned
    return moved.to(k.dtype)


def _pairs(rotation: Rotation) -> tuple[slice, slice]:
    """The two halves of every rotated pair of dims."""
    start, half = rotation.offset, len(rotation.inv_freq)
    if rotation.layout == "half":
        return slice(start, start + half), slice(start + half, start + 2 * half)
    return slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
