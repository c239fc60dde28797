"""Rows in blocks of one pool: sequences that begin alike hold the same blocks.

A block that several hold is never written: whoever wants to gets a copy (copy on write). Blocks
are taken one after another where the pool has them so, and then rows are views as in a slot
cache; otherwise they are gathered for each use.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from kvboost.core import KVGeometry, Span
from kvboost.errors import KVBoostError
from kvboost.models.pool import Pool
from kvboost.models.slots import KeyValue, RowCache

if TYPE_CHECKING:
    from kvboost.codecs.base import KV
    from kvboost.models.rows import SharedRows

Writer: TypeAlias = Callable[[int, KeyValue], None]
"""Called with a layer and one fresh row for each of some caches [1, heads, caches, head_dim]."""

Reader: TypeAlias = Callable[[int], KeyValue]
"""Gives K and V of a layer of some caches, each [caches, heads, rows, head_dim]."""


class BlockPool(Pool):
    """Blocks of rows and how many caches hold each. Not thread-safe but for `stats`."""

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        super().__init__(geometry, num_blocks, block_size)
        self.device = device
        self._holders = np.zeros(num_blocks, np.int32)
        self._was_used = np.zeros(num_blocks, bool)
        self._num_copied = 0
        # The row behind the last block stays zero: it stands for rows that a cache does not have.
        self.blank = self.num_tokens
        # Each [planes, 1, heads, rows, head_dim]: blocks that follow one another are one view.
        self.buffers = [
            _zeros((len(g.planes), 1, g.heads, self.blank + 1, g.head_dim), geometry.dtype, device)
            for g in geometry.groups
        ]
        planes = {
            plane: buffer[place]
            for group, buffer in zip(geometry.groups, self.buffers, strict=True)
            for place, plane in enumerate(group.planes)
        }
        self.layers = {
            plane // 2: (planes[plane], planes[plane + 1]) for plane in planes if plane % 2 == 0
        }

    def cache(self, num_rows: int) -> PagedCache:
        """An empty cache with room for so many rows, and for more as long as there are blocks."""
        return PagedCache(self, self.take(-(-num_rows // self.block_size)))

    def count_shared(self, shared: set[SharedRows]) -> int:
        """Blocks that shared rows take; some may be the beginning of others."""
        return len({block for each in shared for block in each.buffers()})

    def take(self, count: int, after: int = -1) -> list[int]:
        """Free blocks, filled with zeros: those that follow `after`, or else a run, if there are.

        Raises:
            KVBoostError: fewer are free.
        """
        wanted = self._holders[after + 1 : after + 1 + count]
        if len(wanted) == count and not wanted.any():
            blocks = np.arange(after + 1, after + 1 + count)
        else:
            blocks = self._find(count)
        self._holders[blocks] += 1
        # What an earlier request left may lie behind a mask, where it must be a number.
        for first, last in _runs(blocks[self._was_used[blocks]]):
            for buffer in self.buffers:
                buffer[:, :, :, first * self.block_size : (last + 1) * self.block_size] = 0
        self._was_used[blocks] = True
        taken: list[int] = blocks.tolist()
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each."""
        self._holders[blocks] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less; what nobody holds is free."""
        if blocks and self._holders[blocks].min() < 1:
            raise ValueError("a block was released more often than held")
        self._holders[blocks] -= 1

    def unshared(self, block: int) -> int:
        """The same block if nobody else holds it, or a copy in exchange for it."""
        if self._holders[block] == 1:
            return block
        (copy,) = self.take(1)
        size = self.block_size
        for buffer in self.buffers:
            source = buffer[:, :, :, block * size : (block + 1) * size]
            buffer[:, :, :, copy * size : (copy + 1) * size].copy_(source)
        self.release([block])
        self._num_copied += 1
        return copy

    def writer(self, caches: Sequence[PagedCache]) -> Writer:
        """What puts one fresh row behind those that each cache has, where room was made."""
        places = torch.cat([cache.places(cache.length, cache.length + 1) for cache in caches])

        def write(layer: int, fresh: KeyValue) -> None:
            for plane, rows in zip(self.layers[layer], fresh, strict=True):
                plane.index_copy_(2, places, rows)

        return write

    def reader(self, caches: Sequence[PagedCache], num_rows: int) -> Reader:
        """What gives the first rows of each cache; zeros where it has fewer."""
        places = torch.stack([cache.places(0, num_rows) for cache in caches])
        by_heads: dict[int, torch.Tensor] = {}

        def read(layer: int) -> KeyValue:
            key, value = (gather(plane) for plane in self.layers[layer])
            return key, value

        def gather(plane: torch.Tensor) -> torch.Tensor:
            num_heads = plane.shape[1]
            if num_heads not in by_heads:
                by_heads[num_heads] = self._flat(places[:, None], num_heads)
            return self._select(plane, by_heads[num_heads])

        return read

    def gather(self, layer: int, places: torch.Tensor) -> KeyValue:
        """K and V of some rows."""
        key, value = (
            self._select(plane, self._flat(places[None, None], plane.shape[1]))
            for plane in self.layers[layer]
        )
        return key, value

    def _flat(self, places: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Where rows [caches, 1, rows] are for each head, if the rows of all heads are one list."""
        return places + torch.arange(num_heads, device=self.device)[:, None] * (self.blank + 1)

    def _select(self, plane: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Rows of a plane; along the first dimension that is 7 times as fast as along the third."""
        rows = plane.view(-1, plane.shape[3]).index_select(0, flat.flatten())
        return rows.view(*flat.shape, -1)

    def stats(self) -> dict[str, int]:
        """Blocks and bytes now, and copies since the pool was made."""
        holders = self._holders.copy()
        block_bytes = self.block_size * self.geometry.bytes_per_token
        num_used = int(np.count_nonzero(holders))
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "used_blocks": num_used,
            "free_blocks": self.num_blocks - num_used,
            "shared_blocks": int(np.count_nonzero(holders > 1)),
            "saved_blocks": int(holders.sum()) - num_used,
            "copied_blocks": self._num_copied,
            "block_bytes": block_bytes,
            "pool_bytes": self.num_blocks * block_bytes,
            "used_bytes": num_used * block_bytes,
        }

    def _find(self, count: int) -> Any:
        """The first free blocks that follow one another, or just the first ones."""
        free = np.flatnonzero(self._holders == 0)
        if len(free) < count:
            raise KVBoostError(
                f"{count} blocks of K/V are needed, {len(free)} of {self.num_blocks} are free"
            )
        starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        first = starts[0] if len(starts) else 0
        return free[first : first + count]


class PagedCache(RowCache):
    """Rows of one sequence in blocks of a pool; the first may begin in the middle of a block."""

    def __init__(self, pool: BlockPool, blocks: list[int], offset: int = 0) -> None:
        super().__init__(pool.geometry, pool.device)
        self.pool, self._blocks, self._offset = pool, blocks, offset
        self._may_share = offset > 0  # the first block, with what lies before it
        self._note_places()

    def make_room(self, num_rows: int) -> None:
        """Let the next forward write its rows, and have so many in all."""
        self._make_room(0 if self.scattered is not None else self.length, num_rows)

    def layer_rows(self, layer: int, num_rows: int) -> KeyValue:
        """The first rows of a layer: views where its blocks follow one another, else copies."""
        key, value = self.pool.layers[layer]
        if self._first is not None:
            rows = slice(self._first, self._first + num_rows)
            return key[:, :, rows], value[:, :, rows]
        return self.pool.gather(layer, self._places[:num_rows])

    def put(self, layer: int, first: int, fresh: KeyValue) -> None:
        """Write rows of a layer from `first` on, where room was made."""
        stop = first + fresh[0].shape[2]
        for plane, rows in zip(self.pool.layers[layer], fresh, strict=True):
            if self._first is not None:
                plane[:, :, self._first + first : self._first + stop].copy_(rows)
            else:
                plane.index_copy_(2, self._places[first:stop], rows)

    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span`."""
        self._make_room(span.start, span.stop)
        self.length = max(self.length, span.stop)
        for buffer, source in zip(self.pool.buffers, kv, strict=True):
            rows = source[:, :, : len(span)]
            if self._first is not None:
                self._view(buffer, span).copy_(rows)
            else:
                buffer[:, 0].index_copy_(2, self._places[span.start : span.stop], rows.to(buffer))

    def read(self, span: Span) -> KV:
        """The rows of `span`: views where its blocks follow one another, else copies."""
        if self._first is not None:
            return [self._view(buffer, span) for buffer in self.pool.buffers]
        places = self._places[span.start : span.stop]
        return [buffer[:, 0].index_select(2, places) for buffer in self.pool.buffers]

    def head(self, num_rows: int) -> PagedCache:
        """The first rows, in the same blocks; whoever uses it must `hold` them."""
        num_blocks = -(-(self._offset + num_rows) // self.pool.block_size)
        first = PagedCache(self.pool, self._blocks[:num_blocks], self._offset)
        first.length = num_rows
        return first

    def tail(self, num_before: int) -> PagedCache:
        """All rows from `num_before` on; releases the blocks before them and holds the others."""
        num_blocks, offset = divmod(self._offset + num_before, self.pool.block_size)
        rest = PagedCache(self.pool, self._blocks[num_blocks:], offset)
        rest.length, rest.exact_stop = self.length - num_before, self.exact_stop - num_before
        self.pool.release(self._blocks[:num_blocks])
        self._blocks = []
        return rest

    def follows(self, before: RowCache) -> bool:
        """Whether its first row stands at the place in its block that comes after `before`."""
        return self._offset == before.length % self.pool.block_size

    def whole(self, before: RowCache) -> PagedCache:
        """The blocks of both; where one is in both, or we have a copy of it, ours."""
        assert isinstance(before, PagedCache)
        first = before._blocks[: before.length // self.pool.block_size]  # noqa: SLF001
        return PagedCache(self.pool, first + self._blocks)

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of each of its blocks, by the block's number."""
        size = self.pool.block_size
        return dict.fromkeys(self._blocks, (size * self._geometry.bytes_per_token, size))

    def hold(self) -> None:
        """Keep its blocks until one more `release`."""
        self.pool.hold(self._blocks)

    def release(self) -> None:
        """Give its blocks back once; they are free when nobody else holds them."""
        self.pool.release(self._blocks)

    def places(self, first: int, stop: int) -> torch.Tensor:
        """Which rows of the pool its rows are; the blank one where it has none."""
        own = self._places[first:stop]
        return F.pad(own, (0, stop - first - len(own)), value=self.pool.blank)

    def _note_places(self) -> None:
        """Find out which rows of the pool are ours, in order, and whether they are one view."""
        blocks, size = self._blocks, self.pool.block_size
        self.capacity = len(blocks) * size - self._offset
        follow = all(b == a + 1 for a, b in pairwise(blocks))
        self._first = (blocks[0] * size if blocks else 0) + self._offset if follow else None
        starts = torch.tensor(blocks, device=self.device, dtype=torch.long)[:, None] * size
        self._places = (starts + torch.arange(size, device=self.device)).flatten()[self._offset :]

    def _make_room(self, first: int, stop: int) -> None:
        """Let the rows from `first` to `stop` be written."""
        if stop > self.capacity:
            count = -(-(stop - self.capacity) // self.pool.block_size)
            self._blocks += self.pool.take(count, after=self._blocks[-1] if self._blocks else -1)
            self._note_places()
        if self._may_share and first + self._offset < self.pool.block_size:
            self._blocks[0] = self.pool.unshared(self._blocks[0])
            self._may_share = False
            self._note_places()

    def _view(self, buffer: torch.Tensor, span: Span) -> torch.Tensor:
        assert self._first is not None
        return buffer[:, 0, :, self._first + span.start : self._first + span.stop]


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU memory that the system gives only as it is written, unlike torch.zeros."""
    kind = getattr(torch, dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=kind, device=device)
    num_bytes = math.prod(shape) * kind.itemsize
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:  # Windows
        memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a block is a few rows in each of many places
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=kind).view(shape)


def _runs(blocks: Any) -> list[tuple[int, int]]:
    """The first and last of blocks that follow one another."""
    pieces = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
    return [(int(piece[0]), int(piece[-1])) for piece in pieces if len(piece)]
