"""The K/V of one request in vLLM's blocks as `Slots`, and stored chunks as blocks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvboost.codecs.base import Codec
from kvboost.codecs.frame import LastFrame, allocate
from kvboost.connectors.vllm.blocks import Bytes, PagedCache
from kvboost.core import Anchor, Entry, Span
from kvboost.models.rows import TURNED_AT_ONCE
from kvboost.models.upload import beside, fetched, sent, upload
from kvboost.tiers.base import StoredChunk
from kvboost.tiers.host import FrameChunk, HostFrames

if TYPE_CHECKING:
    from kvboost.codecs.base import KV
    from kvboost.models.base import Slots

STAGED_BYTES = 128 << 20  # of chunks on their way; they take up to three times as much on a GPU
FIRST_STAGE = 4  # chunks: most saves are of a few new ones


class BlockRows:
    """The K/V of one request, in vLLM's own blocks (a `kvboost.models.base.Slots`)."""

    def __init__(self, cache: PagedCache, block_ids: Sequence[int]) -> None:
        self.exact_stop = sys.maxsize
        self.block_ids = block_ids
        self._cache = cache
        starts = np.asarray(block_ids, np.int64)[:, None] * cache.block_size
        slots = (starts + np.arange(cache.block_size)).ravel()
        self._blocks, self._slots = upload(cache.device, block_ids, slots)

    def place(self, span: Span, chunk: StoredChunk, offset: int) -> None:
        """Copy tokens of a stored chunk from `offset` on to the rows of `span`."""
        if isinstance(chunk, BlockChunk) and not offset and (whole := self.whole_blocks(span)):
            chunk.copy_to(whole)
            return
        stop = offset + len(span)
        self.write(span, [part[:, :, offset:stop] for part in chunk.kv()])

    def whole_blocks(self, span: Span) -> Sequence[int]:
        """The blocks that `span` fills, if it fills all of them and they can be copied."""
        size = self._cache.block_size
        if not self._cache.fills_blocks or span.start % size or span.stop % size:
            return []
        found = self.block_ids[span.start // size : span.stop // size]
        return found if len(found) * size == len(span) else []

    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span`."""
        planes = sent(kv[0], self._cache.device)  # one copy for all layers
        size, fills = self._cache.block_size, self._cache.fills_blocks
        step = size if fills else max(1, span.stop)
        for start in range(span.start // step * step, span.stop, step):
            part = span.within(Span(start, start + step))
            rows = planes[:, :, part.start - span.start : part.stop - span.start]
            if fills and len(part) == size:
                self._cache.fill(int(self._blocks[start // size]), rows)
            else:
                self._put(rows.transpose(1, 2), self._slots[part.start : part.stop])

    def read(self, span: Span) -> KV:
        """A copy of the rows of `span`, in host memory."""
        planes = self._take(span)
        with beside([self._cache.device]):
            return [fetched(planes).contiguous()]

    def turn(self, span: Span, change: Callable[[KV], None]) -> None:
        """Change the rows of `span`."""
        for start in range(span.start, span.stop, TURNED_AT_ONCE):
            part = Span(start, min(start + TURNED_AT_ONCE, span.stop))
            rows = self.read(part)
            change(rows)
            self.write(part, rows)

    def _put(self, planes: torch.Tensor, slots: torch.Tensor) -> None:
        """Write planes [planes, tokens, heads, head_dim]."""
        for layer in range(self._cache.geometry.num_layers):
            self._cache.put(layer, planes[2 * layer : 2 * layer + 2], slots)

    def _take(self, span: Span) -> torch.Tensor:
        """Planes [planes, heads, tokens, head_dim] of the rows of `span`, on the device."""
        size = self._cache.block_size
        first, last = span.start // size, -(-span.stop // size)
        blocks = self._blocks[first:last]
        part = slice(span.start - first * size, span.stop - first * size)
        return self._cache.take(blocks)[:, :, part]


class StagedRows(BlockRows):
    """Rows of one save or one load: on a GPU many chunks at a time, a few kernels a layer.

    While they are read nobody may write them; `flush` ends writing.
    """

    def __init__(self, cache: PagedCache, block_ids: Sequence[int]) -> None:
        super().__init__(cache, block_ids)
        is_staged = cache.device.type != "cpu"
        self._most = STAGED_BYTES // cache.geometry.bytes_per_token if is_staged else 0
        self._taken, self._planes = Span(0, 0), torch.empty(0)
        self._waiting: list[tuple[Span, torch.Tensor]] = []  # to be written

    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span`, by the next flush."""
        if not self._most:
            super().write(span, kv)
            return
        self._waiting.append((span, kv[0][:, :, : len(span)]))
        if sum(len(span) for span, _ in self._waiting) >= self._most:
            self.flush()

    def flush(self) -> None:
        """Write what is staged."""
        if not self._waiting:
            return
        planes = [sent(each, self._cache.device).transpose(1, 2) for _, each in self._waiting]
        slots = [self._slots[span.start : span.stop] for span, _ in self._waiting]
        self._put(torch.cat(planes, dim=1), torch.cat(slots))
        self._waiting = []  # last: after a fault, the next flush tries again or fails the load

    def _take(self, span: Span) -> torch.Tensor:
        if not (self._taken.start <= span.start and span.stop <= self._taken.stop):
            # A prompt is saved from its end to its beginning.
            ahead = min(self._most, FIRST_STAGE * len(span)) if not self._taken.stop else self._most
            self._taken = Span(min(span.start, max(0, span.stop - ahead)), span.stop)
            self._planes = torch.empty(0)  # its memory is needed now
            self._planes = super()._take(self._taken)
        first = span.start - self._taken.start
        return self._planes[:, :, first : first + len(span)]


class BlockChunk:
    """A stored chunk that lies in host memory as in vLLM's blocks (`StoredChunk`)."""

    rows = None
    is_in_use = False

    def __init__(
        self,
        cache: PagedCache,
        codec: Codec,
        entry: Entry,
        anchors: Iterable[Anchor],
        block_ids: Sequence[int],
    ) -> None:
        """A copy of whole blocks."""
        self.entry, self.anchors = entry, tuple(anchors)
        self._cache, self._codec, self._frame = cache, codec, LastFrame()
        layers = cache.block_bytes
        shape = len(layers), len(block_ids), layers[0].shape[1]
        self.nbytes = math.prod(shape)
        self._blocks: Bytes = np.frombuffer(allocate(self.nbytes), np.uint8).reshape(shape)
        for copies, blocks in zip(self._blocks, layers, strict=True):
            for copy, block_id in zip(copies, block_ids, strict=True):
                copy[:] = blocks[block_id]

    def copy_to(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with the first of these."""
        for copies, blocks in zip(self._blocks, self._cache.block_bytes, strict=True):
            for copy, block_id in zip(copies, block_ids, strict=False):
                blocks[block_id] = copy

    def kv(self) -> KV:
        """Its K/V."""
        return [self._cache.unpack(self._blocks)]

    def frame(self) -> memoryview:
        """Its frame: the last one, if a tier still has it, or a new one."""
        return self._frame.get(self.entry, self.kv, self._codec, self.anchors)


class HostBlocks:
    """Keeps chunks of whole blocks as they are, others as frames (`kvboost.tiers.base.Medium`)."""

    def __init__(self, cache: PagedCache, codec: Codec) -> None:
        self._cache, self._codec, self._frames = cache, codec, HostFrames(codec)

    def from_slots(
        self, entry: Entry, slots: Slots, span: Span, anchors: Iterable[Anchor]
    ) -> StoredChunk:
        """A chunk of rows; these may be overwritten afterwards."""
        whole = slots.whole_blocks(span) if isinstance(slots, BlockRows) else []
        if whole:
            return BlockChunk(self._cache, self._codec, entry, anchors, whole)
        return self._frames.from_slots(entry, slots, span, anchors)

    def from_frame(self, frame: memoryview) -> FrameChunk:
        """A chunk of a copy of `frame`, which was checked."""
        return self._frames.from_frame(frame)

    def loading(self) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return self._frames.loading()
