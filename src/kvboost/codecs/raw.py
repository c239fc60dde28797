"""Lossless codec: the bytes of each plane group one after another; decoding is a view."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvboost.codecs.base import Codec, stay

if TYPE_CHECKING:
    from kvboost.codecs.base import KV, Send


class RawCodec(Codec):
    """The tensors as they are."""

    number = 0

    def size(self, num_tokens: int) -> int:
        """As large as the tensors."""
        return self.geometry.bytes_per_token * num_tokens

    def encode(self, kv: KV, payload: memoryview) -> None:
        """Copy the groups one after another."""
        for target, source in zip(self.decode(payload, kv[0].shape[2]), kv, strict=True):
            target.copy_(source)

    def decode(self, payload: memoryview, num_tokens: int, send: Send = stay) -> KV:
        """Views of the payload, no copy but by `send`."""
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        dtype: torch.dtype = getattr(torch, self.geometry.dtype)
        views, cursor = [], 0
        for number, group in enumerate(self.geometry.groups):
            shape = (len(group.planes), group.heads, num_tokens, group.head_dim)
            size = math.prod(shape) * self.geometry.itemsize
            views.append(send(whole[cursor : cursor + size], number).view(dtype).view(shape))
            cursor += size
        return views
