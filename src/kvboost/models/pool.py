"""Where the rows of the batch come from: buffers of their own, or blocks of one pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from kvboost.core import KVGeometry
from kvboost.models.slots import RowCache, SlotCache

if TYPE_CHECKING:
    from kvboost.models.rows import Rows, SharedRows


class Pool(ABC):
    """Room for the K/V of running requests, in blocks of `block_size` tokens."""

    def __init__(self, geometry: KVGeometry, num_blocks: int, block_size: int) -> None:
        self.geometry = geometry
        self.num_blocks, self.block_size = num_blocks, block_size

    @property
    def num_tokens(self) -> int:
        """The longest sequence that fits."""
        return self.num_blocks * self.block_size

    @abstractmethod
    def cache(self, num_rows: int) -> RowCache:
        """An empty cache with room for so many rows, and for more as long as the pool has it."""

    def room(self, running: Iterable[tuple[Rows, int]]) -> int:
        """Tokens of the longest sequence that has room beside others, below 0 if they have none.

        Each of the others is given with the tokens that it may have. None of them can run out of
        blocks before: those at the end of shared rows are counted for all who may have a copy.
        """
        size, members = self.block_size, list(running)
        used = sum(-(-most // size) - rows.num_shared // size for rows, most in members)
        used += self.count_shared({rows.shared for rows, _ in members if rows.shared is not None})
        num_copied = 0 if size == 1 else 1  # the new one may be the first to share in a block
        return (self.num_blocks - used - num_copied) * size

    def count_shared(self, shared: set[SharedRows]) -> int:
        """Blocks that shared rows take."""
        return sum(-(-each.num_rows // self.block_size) for each in shared)


class SlotPool(Pool):
    """A buffer for each sequence."""

    def __init__(self, geometry: KVGeometry, num_tokens: int, device: torch.device) -> None:
        super().__init__(geometry, num_tokens, 1)
        self._device = device

    def cache(self, num_rows: int) -> SlotCache:
        """An empty cache with room for so many rows; it grows by moving."""
        return SlotCache(self.geometry, num_rows, self._device)
