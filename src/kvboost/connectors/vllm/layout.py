"""The layout of K and V in a layer's blocks, detected by writing known numbers.

Every attention back end of vLLM arranges its blocks in its own way (some pack K for matrix
instructions). All have one operation that writes rows into blocks: it is given rows of known
numbers, and where these turn up is the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvboost.errors import UnsupportedModel

BASE = 128  # whole numbers up to it are exact in every dtype of 16 bits and more

WriteRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes K and V [tokens, heads, head_dim] into a layer's blocks at slots."""


@dataclass(frozen=True)
class Layout:
    """How to read blocks, whichever way they are written."""

    block_dim: int  # of a layer's tensor: which of its dimensions counts blocks
    places: torch.Tensor  # [2, heads, block_size, head_dim]: where in a block each number lies

    def read(self, caches: Sequence[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
        """K and V [2 * layers, heads, tokens, head_dim] of all tokens in blocks of layers."""
        dim, shape = self.block_dim, (len(caches), len(blocks))
        picked = torch.stack([cache.index_select(dim, blocks) for cache in caches])
        rows = picked.movedim(dim + 1, 1).reshape(*shape, -1)
        rows = rows.index_select(2, self.places.reshape(-1)).view(*shape, *self.places.shape)
        _, heads, _, head_dim = self.places.shape
        return rows.permute(0, 2, 3, 1, 4, 5).reshape(2 * shape[0], heads, -1, head_dim)

    def pick(
        self, cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """K and V [2, heads, tokens, head_dim] of single tokens, each at an offset of a block."""
        outer = cache.movedim(self.block_dim, 0)
        inner = torch.unravel_index(self.places[:, :, offsets], outer.shape[1:])
        picked: torch.Tensor = outer[(blocks[None, None, :, None], *inner)]
        return picked


def learn_layout(
    cache: torch.Tensor, num_blocks: int, block_size: int, heads: int, head_dim: int, put: WriteRows
) -> Layout:
    """Write numbered rows into a small copy of a layer's blocks and see where they went.

    Raises:
        UnsupportedModel: they did not come out as they went in.
    """
    if num_blocks not in cache.shape[:2]:
        raise UnsupportedModel(f"vLLM keeps its K/V in a tensor of shape {tuple(cache.shape)}")
    block_dim = cache.shape.index(num_blocks)
    small = torch.zeros_like(cache.narrow(block_dim, 0, 2))
    shape = (2, heads, block_size, head_dim)
    numbers = torch.arange(2 * heads * block_size * head_dim, device=cache.device).view(shape)
    slots = torch.arange(block_size, 2 * block_size, device=cache.device)  # of the second block
    found = torch.zeros(small.numel() // 2, dtype=torch.int64, device=cache.device)
    scale = 1
    while scale < numbers.numel():
        rows = (numbers // scale % BASE + 1).to(cache.dtype).transpose(1, 2)
        put(rows[0].contiguous(), rows[1].contiguous(), small, slots)
        digits = small.select(block_dim, 1).reshape(-1).float() - 1
        found += digits.to(torch.int64) * scale
        scale *= BASE
    places = found.argsort()
    if found.numel() != numbers.numel() or not torch.equal(found[places], numbers.reshape(-1)):
        raise UnsupportedModel(f"vLLM's blocks {tuple(cache.shape)} do not hold K/V as written")
    return Layout(block_dim, places.view(shape))
