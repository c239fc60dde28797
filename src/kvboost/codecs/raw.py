"""Lossless codec: the bytes of each plane group one after another; decoding is a view."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvboost.codecs.base import Codec
from kvboost.core import KVGeometry
from kvboost.errors import CacheError

if TYPE_CHECKING:
    from kvboost.codecs.base import KV


class RawCodec(Codec):
    """The tensors as they are."""

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)

    def encode(self, kv: KV) -> memoryview:
        """Copy the groups into one buffer in host memory."""
        num_tokens = kv[0].shape[2]
        frame = torch.empty(self._geometry.bytes_per_token * num_tokens, dtype=torch.uint8)
        for target, source in zip(self._views(frame, num_tokens), kv, strict=True):
            target.copy_(source)
        return memoryview(frame.numpy().data)

    def decode(self, frame: memoryview, num_tokens: int) -> KV:
        """Views of the frame, no copy."""
        expected = self._geometry.bytes_per_token * num_tokens
        if frame.nbytes != expected:
            raise CacheError(
                f"{num_tokens} tokens take {expected} bytes, the frame has {frame.nbytes}"
            )
        return self._views(torch.frombuffer(frame, dtype=torch.uint8), num_tokens)

    def _views(self, frame: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        views, cursor = [], 0
        for group in self._geometry.groups:
            shape = (len(group.planes), group.heads, num_tokens, group.head_dim)
            size = math.prod(shape) * self._geometry.itemsize
            views.append(frame[cursor : cursor + size].view(self._dtype).view(shape))
            cursor += size
        return views
