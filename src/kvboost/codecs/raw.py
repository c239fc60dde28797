"""Lossless codec: the bytes of each plane group one after another; decoding is a view."""

from __future__ import annotations

import math
from mmap import mmap
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

    def encode(self, kv: KV, sensitivity: bytes = b"") -> memoryview:
        """Copy the groups, then the sensitivity, into one buffer in host memory."""
        num_tokens = kv[0].shape[2]
        # A mapping of its own goes back to the system when the frame is dropped; the allocator
        # would keep pieces of it, and memory would grow beyond the store's budget.
        size = self._geometry.bytes_per_token * num_tokens
        frame = memoryview(mmap(-1, size + len(sensitivity)))
        frame[size:] = sensitivity
        for target, source in zip(self.decode(frame, num_tokens), kv, strict=True):
            target.copy_(source)
        return frame

    def decode(self, frame: memoryview, num_tokens: int) -> KV:
        """Views of the frame, no copy."""
        expected = self._geometry.bytes_per_token * num_tokens
        if frame.nbytes not in (expected, expected + num_tokens):
            raise CacheError(
                f"{num_tokens} tokens take {expected} bytes, the frame has {frame.nbytes}"
            )
        return self._views(torch.frombuffer(frame, dtype=torch.uint8), num_tokens)

    def sensitivity(self, frame: memoryview, num_tokens: int) -> bytes:
        """The bytes after the tensors."""
        return bytes(frame[self._geometry.bytes_per_token * num_tokens :])

    def _views(self, frame: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        views, cursor = [], 0
        for group in self._geometry.groups:
            shape = (len(group.planes), group.heads, num_tokens, group.head_dim)
            size = math.prod(shape) * self._geometry.itemsize
            views.append(frame[cursor : cursor + size].view(self._dtype).view(shape))
            cursor += size
        return views
