"""The block table of a sequence: which rows of the pool hold its K/V."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvboost.core import KVGeometry, Span
from kvboost.models.pool import BlockPool, Blocks, KeyValue, Run, cut, merged, runs

if TYPE_CHECKING:
    from kvboost.codecs.base import KV
    from kvboost.tiers.base import StoredChunk

PRIVATE_BLOCK = 16
TURNED_AT_ONCE = 128  # rows: copies in single precision stay small
TURNED_ON_DEVICES = 8192  # launches cost more
SHORT_RUN_BYTES = 2**18  # in a layer: attention to shorter runs one by one takes longer than a copy


class Rows:
    """A row of the pool for each position of a sequence, filled in any order.

    The first `num_shared` rows may be read by others and are never written here. Not thread-safe.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_rows: int,
        prefix: Sequence[Run] = (),
        after: int | None = None,
    ) -> None:
        """An empty sequence of `num_rows` rows, or one that begins with filled rows.

        `after` is the block that its own ones follow, if they can.
        """
        self.pool = pool
        self._prefix, self._blocks = list(prefix), np.arange(0)
        self.exact_stop = sys.maxsize  # rows before this one are exact
        self.is_private = False
        self.num_shared = self.length = sum(stop - start for start, stop in prefix)
        """`length`: rows that are filled, or lie before one that is."""
        pool.hold(pool.blocks_of(prefix))
        self._grow(num_rows - self.length, after)

    @property
    def capacity(self) -> int:
        """Rows in all blocks it has."""
        return self.num_shared + len(self._blocks) * self.pool.block_size

    @property
    def blocks(self) -> Blocks:
        """The blocks that hold its rows, in any order."""
        return np.concatenate([self.pool.blocks_of(self._prefix), self._blocks])

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.pool.device

    @property
    def num_runs(self) -> int:
        """Number of contiguous views of its rows."""
        return len(self._runs)

    def make_room(self, num_rows: int) -> None:
        """Take blocks until `num_rows` rows fit.

        Raises:
            KVBoostError: the pool is full.
        """
        if num_rows > self.capacity:
            self._grow(num_rows - self.capacity)

    def crop(self, length: int) -> None:
        """Forget the rows from `length` on; their blocks stay."""
        self.length = min(self.length, length)

    def release(self) -> None:
        """Return the rows to the pool; happens by itself when a request is dropped."""
        own, prefix = self._blocks, self._prefix
        self._blocks, self._prefix = own[:0], []
        self.pool.release(own)
        self.pool.release(self.pool.blocks_of(prefix))

    __del__ = release

    def runs(self, span: Span) -> list[Run]:
        """The rows of the pool for `span`, as runs."""
        return cut(self._runs, span.start, span.stop)

    def read(self, span: Span) -> KV:
        """K/V of `span`: views where it is one run, else copies."""
        return self.pool.read(self.runs(span))

    def turn(self, span: Span, change: Callable[[KV], None]) -> None:
        """Change the rows of `span` in place, run by run."""
        at_once = TURNED_AT_ONCE if self.device.type == "cpu" else TURNED_ON_DEVICES
        for first, stop in self.runs(span):
            for start in range(first, stop, at_once):
                change(self.pool.read([(start, min(start + at_once, stop))]))

    def place(self, span: Span, chunk: StoredChunk, offset: int) -> None:
        """Copy tokens of a stored chunk from `offset` on to the rows of `span`."""
        stop = offset + len(span)
        self.write(span, [part[:, :, offset:stop] for part in chunk.kv()])

    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span`."""
        assert span.start >= self.num_shared
        self.make_room(span.stop)
        self.length = max(self.length, span.stop)
        self.pool.write(self.runs(span), kv)

    def layer(self, index: int, first: int, stop: int) -> list[KeyValue]:
        """K and V of rows of a layer, a view for each run."""
        key, value = self.pool.layers[index]
        pieces = cut(self._runs, first, stop) or [(0, 0)]
        return [(key[:, :, start:end], value[:, :, start:end]) for start, end in pieces]

    def whole(self, index: int, first: int, stop: int) -> KeyValue:
        """K and V of rows of a layer; a copy where they are several runs."""
        pieces = self.layer(index, first, stop)
        if len(pieces) == 1:
            return pieces[0]
        key, value = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
        return key, value

    def put(self, index: int, first: int, fresh: KeyValue) -> None:
        """Write neighbouring rows of a layer, where room was made."""
        pieces = cut(self._runs, first, first + fresh[0].shape[2])
        for plane, rows in zip(self.pool.layers[index], fresh, strict=True):
            done = 0
            for start, stop in pieces:
                plane[:, :, start:stop].copy_(rows[:, :, done : done + stop - start])
                done += stop - start

    def slot_mapping(self, first: int, stop: int) -> Blocks:
        """The slot mapping: rows of the pool by position; the blank one where it has none."""
        found = np.full(stop - first, self.pool.blank)
        done = 0
        for start, end in cut(self._runs, first, stop):
            found[done : done + end - start] = np.arange(start, end)
            done += end - start
        return found

    def _grow(self, num_rows: int, after: int | None = None) -> None:
        last = int(self._blocks[-1]) if len(self._blocks) else after
        more = self.pool.take(max(0, self.pool.blocks_for(num_rows)), after=last)
        self._blocks, size = np.concatenate([self._blocks, more]), self.pool.block_size
        own = [(start * size, stop * size) for start, stop in runs(self._blocks)]
        self._runs = merged([*self._prefix, *own])


class Past:
    """Rows of a sequence that a forward attends to, layer by layer.

    A view for each run; one copy where runs are short (CPU).
    """

    def __init__(self, rows: Rows, first: int, stop: int) -> None:
        self._pool, self._runs = rows.pool, rows.runs(Span(first, stop))
        row_bytes = rows.pool.geometry.bytes_per_token // rows.pool.geometry.num_layers
        are_short = (stop - first) * row_bytes < len(self._runs) * SHORT_RUN_BYTES
        self._slots: torch.Tensor | None = None
        if len(self._runs) > 1 and are_short:
            self._slots = torch.from_numpy(rows.slot_mapping(first, stop))[None]

    def layer(self, index: int) -> list[KeyValue]:
        """K and V of a layer, in one or several parts."""
        if self._slots is not None:
            return [self._pool.gather(index, self._slots)]
        key, value = self._pool.layers[index]
        return [(key[:, :, start:stop], value[:, :, start:stop]) for start, stop in self._runs]


def private_rows(geometry: KVGeometry, num_rows: int, device: torch.device) -> Rows:
    """An empty sequence in a pool of its own, of just that size."""
    num_blocks = -(-num_rows // PRIVATE_BLOCK)
    rows = Rows(BlockPool(geometry, num_blocks, PRIVATE_BLOCK, device), num_rows)
    rows.is_private = True
    return rows
