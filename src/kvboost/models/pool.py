"""The KV pool: blocks of K/V, each layer's on its device, with counts of their holders."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvboost.core import KVGeometry
from kvboost.errors import KVBoostError
from kvboost.madvise import reserve

if TYPE_CHECKING:
    from kvboost.codecs.base import KV
    from kvboost.models.rows import Rows

KeyValue: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each [batch, heads, rows, head_dim]."""

Blocks: TypeAlias = npt.NDArray[np.int64]

Run: TypeAlias = tuple[int, int]
"""Rows [start, stop) of the pool."""


class BlockPool:
    """Blocks of `block_size` rows in one arena. Counting is thread-safe.

    Whoever took a block writes to it; others that hold it only read rows that were written before.
    """

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """`device`: the one that forwards begin on."""
        self.geometry, self.device = geometry, device
        self.devices = devices_of(geometry, device)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self.evict: Callable[[int], bool] = lambda num_bytes: False
        """Evicts stored chunks of so many bytes; whether there were any."""
        self.pinned: Callable[[], Sequence[Run]] = lambda: ()
        """Rows of stored chunks that cannot be evicted now."""
        self._lock = threading.RLock()  # a garbage collection inside may drop chunks
        self._holders = np.zeros(num_blocks, np.int32)  # running requests
        self._kept = np.zeros(num_blocks, np.int32)  # stored chunks
        # The row behind the last block stays zero: it pads tables of different lengths.
        self.blank = self.num_tokens
        # Each [planes, heads, rows, head_dim], so that neighbouring blocks are one view.
        self.buffers = [
            _zeros((len(g.planes), g.heads, self.blank + 1, g.head_dim), self.dtype, place)
            for g, place in zip(geometry.groups, self.devices, strict=True)
        ]
        planes = {
            plane: buffer[place][None]
            for group, buffer in zip(geometry.groups, self.buffers, strict=True)
            for place, plane in enumerate(group.planes)
        }
        self.layers: dict[int, KeyValue] = {
            plane // 2: (planes[plane], planes[plane + 1]) for plane in planes if plane % 2 == 0
        }

    @property
    def num_tokens(self) -> int:
        """The longest sequence that fits."""
        return self.num_blocks * self.block_size

    @property
    def num_free(self) -> int:
        """Blocks without holders and stored chunks."""
        return int(np.count_nonzero(self._holders + self._kept == 0))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_size * self.geometry.bytes_per_token

    def room(self, running: Iterable[tuple[Rows, int]], leaving: Iterable[Rows] = ()) -> int:
        """Tokens of the longest sequence that has room beside others, below 0 if they have none.

        Each of the running ones is given with the number of rows that it may come to; the rows of
        those `leaving` count as free.
        """
        growing = ((rows, most) for rows, most in running if rows.pool is self)
        more = sum(self.blocks_for(max(0, most - rows.capacity)) for rows, most in growing)
        with self._lock:
            holders = self._holders.copy()
        holders[self.blocks_of(self.pinned())] += 1
        for rows in leaving:
            if rows.pool is self:
                holders[rows.blocks] -= 1
        return (self.num_blocks - int(np.count_nonzero(holders)) - more) * self.block_size

    def blocks_for(self, num_rows: int) -> int:
        """Blocks that so many rows take."""
        return -(-num_rows // self.block_size)

    def take(self, count: int, after: int | None = None) -> Blocks:
        """Free blocks: those that follow `after`, or else with as few gaps as possible.

        Raises:
            KVBoostError: fewer are free.
        """
        # Evict nothing if that would not be enough.
        can_have = count <= self.num_free or count * self.block_size <= self.room([])
        while can_have and (missing := count - self.num_free) > 0:
            if not self.evict(missing * self.block_bytes):
                break
        with self._lock:
            blocks = self._find(count, after)
            self._holders[blocks] += 1
        return blocks

    def hold(self, blocks: Blocks) -> None:
        """Count one more holder of each block."""
        with self._lock:
            self._holders[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Count one holder less; blocks without holders are free."""
        with self._lock:
            if len(blocks) and self._holders[blocks].min() < 1:
                raise ValueError("a block was released more often than held")
            self._holders[blocks] -= 1

    def keep(self, rows: Sequence[Run]) -> None:
        """Count one more stored chunk in the blocks that rows lie in."""
        with self._lock:
            self._kept[self.blocks_of(rows)] += 1

    def drop(self, rows: Sequence[Run]) -> None:
        """Count one stored chunk less."""
        with self._lock:
            self._kept[self.blocks_of(rows)] -= 1

    def are_held(self, rows: Sequence[Run]) -> bool:
        """Whether running requests hold all blocks that rows lie in."""
        blocks = self.blocks_of(rows)
        return bool(len(blocks)) and int(self._holders[blocks].min()) > 0

    def read(self, rows: Sequence[Run]) -> KV:
        """K/V of rows: views if they are one run, else copies."""
        parts = [[buffer[:, :, start:stop] for start, stop in rows] for buffer in self.buffers]
        return [each[0] if len(each) == 1 else torch.cat(each, dim=2) for each in parts]

    def write(self, rows: Sequence[Run], kv: KV) -> None:
        """Copy K/V to rows."""
        for buffer, source in zip(self.buffers, kv, strict=True):
            done = 0
            for start, stop in rows:
                buffer[:, :, start:stop].copy_(source[:, :, done : done + stop - start])
                done += stop - start

    def blocks_of(self, rows: Sequence[Run]) -> Blocks:
        """The blocks that rows lie in."""
        size = self.block_size
        each = [np.arange(start // size, (stop - 1) // size + 1) for start, stop in rows]
        return np.unique(np.concatenate(each)) if each else np.arange(0)

    def put(self, layer: int, slot_mapping: torch.Tensor, fresh: KeyValue) -> None:
        """Write K and V of some rows of a layer."""
        for plane, rows in zip(self.layers[layer], fresh, strict=True):
            plane.index_copy_(2, slot_mapping, rows)

    def gather(self, layer: int, slot_mapping: torch.Tensor) -> KeyValue:
        """K and V by a slot mapping [tables, rows]."""
        key, value = (_select(plane, slot_mapping, self.blank + 1) for plane in self.layers[layer])
        return key, value

    def stats(self) -> dict[str, int]:
        """Blocks and bytes now."""
        holders = self._holders.copy()
        num_used = int(np.count_nonzero(holders))
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "used_blocks": num_used,
            "cached_blocks": int(np.count_nonzero((self._kept > 0) & (holders == 0))),
            "free_blocks": self.num_free,
            "shared_blocks": int(np.count_nonzero(holders > 1)),
            "saved_blocks": int(holders.sum()) - num_used,
            "block_bytes": self.block_bytes,
            "pool_bytes": self.num_blocks * self.block_bytes,
            "used_bytes": num_used * self.block_bytes,
        }

    def _find(self, count: int, after: int | None) -> Blocks:
        is_free = self._holders + self._kept == 0
        if after is not None:
            wanted = is_free[after + 1 : after + 1 + count]
            if len(wanted) == count and wanted.all():
                return np.arange(after + 1, after + 1 + count)
        gaps = runs(np.flatnonzero(is_free))
        num_free = sum(stop - start for start, stop in gaps)
        if num_free < count:
            raise KVBoostError(
                f"{count} blocks of K/V are needed, {num_free} of {self.num_blocks} are free"
            )
        taken: list[Blocks] = []
        for start, stop in sorted(gaps, key=lambda gap: gap[0] - gap[1]):
            wanted_now = min(count, stop - start)
            # In the middle of a large gap both neighbours can grow.
            first = start + (stop - start - wanted_now) // 2
            taken.append(np.arange(first, first + wanted_now))
            count -= wanted_now
            if not count:
                break
        return np.concatenate(taken) if taken else np.arange(0)


def devices_of(geometry: KVGeometry, home: torch.device) -> list[torch.device]:
    """Of each plane group; `home` where they are not on several."""
    numbers = (group.device for group in geometry.groups)
    return [home if each is None else torch.device(home.type, each) for each in numbers]


def cut(rows: Sequence[Run], first: int, stop: int) -> list[Run]:
    """Rows number `first` to `stop` of these runs."""
    found, before = [], 0
    for start, end in rows:
        low, high = max(first, before), min(stop, before + end - start)
        if low < high:
            found.append((start + low - before, start + high - before))
        before += end - start
        if before >= stop:
            break
    return found


def merged(rows: Iterable[Run]) -> list[Run]:
    """The same rows, neighbouring runs as one."""
    found: list[Run] = []
    for start, stop in rows:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def runs(blocks: Blocks) -> list[tuple[int, int]]:
    """[start, stop) of neighbouring blocks, in their order."""
    pieces = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces if len(piece)]


def _select(plane: torch.Tensor, slot_mapping: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows of a plane; along the first dimension that is 7 times as fast as along the third."""
    heads = torch.arange(plane.shape[1], device=slot_mapping.device)[:, None] * num_rows
    flat = slot_mapping[:, None] + heads
    rows = plane.view(-1, plane.shape[3]).index_select(0, flat.flatten())
    return rows.view(*flat.shape, -1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU memory that the system gives only as it is written, unlike torch.zeros."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(reserve(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
