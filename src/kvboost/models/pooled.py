"""Stored chunks in the KV pool: K/V stays in the rows where it was computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvboost.codecs.base import Codec
from kvboost.codecs.frame import LastFrame, allocate, check_codec, decode, read
from kvboost.core import Anchor, Entry, Span
from kvboost.models.pool import BlockPool, Run
from kvboost.models.rows import Rows
from kvboost.models.upload import beside, fetched, follow, sent

if TYPE_CHECKING:
    import torch

    from kvboost.codecs.base import KV
    from kvboost.models.base import Slots


class PooledChunk:
    """A stored chunk in rows of the pool (`kvboost.tiers.base.StoredChunk`).

    Its blocks are kept until nobody refers to it. Nobody writes its rows.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: Sequence[Run],
        codec: Codec,
        entry: Entry,
        anchors: Iterable[Anchor],
    ) -> None:
        self.entry, self.rows = entry, rows
        self.anchors, self._pool, self._codec = tuple(anchors), pool, codec
        self.nbytes = entry.num_tokens * pool.geometry.bytes_per_token
        self._frame = LastFrame()
        pool.keep(rows)

    def __del__(self) -> None:
        self._pool.drop(self.rows)

    @property
    def is_in_use(self) -> bool:
        """Whether running requests hold all its blocks, so that evicting it frees nothing."""
        return self._pool.are_held(self.rows)

    def kv(self) -> KV:
        """Its K/V: views if its rows are one run."""
        return self._pool.read(self.rows)

    def frame(self) -> memoryview:
        """Its frame: the last one, if a tier still has it, or a new one."""
        return self._frame.get(self.entry, self._fetched, self._codec, self.anchors)

    def _fetched(self) -> KV:
        with beside(self._pool.devices):
            return [fetched(part) for part in self.kv()]


class PooledChunks:
    """Keeps chunks in the pool (`kvboost.tiers.base.Medium`)."""

    def __init__(self, pool: BlockPool, codec: Codec) -> None:
        self._pool, self._codec = pool, codec
        self._last: int | None = None  # block of the chunk that was copied last

    def from_slots(
        self, entry: Entry, slots: Slots, span: Span, anchors: Iterable[Anchor]
    ) -> PooledChunk:
        """A chunk of rows of the pool, which nobody writes from now on; others are copied."""
        if isinstance(slots, Rows) and slots.pool is self._pool:
            return PooledChunk(self._pool, slots.runs(span), self._codec, entry, anchors)
        return self._copy(slots.read(span), entry, anchors)

    def from_frame(self, frame: memoryview) -> PooledChunk:
        """A chunk of a copy of `frame`, which was checked."""
        head = read(frame)
        check_codec(head, self._codec)
        if frame.readonly:  # torch wants it writable
            frame, mapped = allocate(frame.nbytes), frame
            frame[:] = mapped
        kv = decode(frame, head, self._codec, self._send)
        return self._copy(kv, head.entry, head.anchors)

    def loading(self) -> AbstractContextManager[None]:
        """Chunks of frames made inside are copied beside the model, and are there at the end."""
        return beside(self._pool.devices)

    def _send(self, part: torch.Tensor, group: int) -> torch.Tensor:
        return sent(part, self._pool.devices[group])

    def _copy(self, kv: KV, entry: Entry, anchors: Iterable[Anchor]) -> PooledChunk:
        rows = Rows(self._pool, entry.num_tokens, after=self._last)
        try:
            self._last = int(rows.blocks[-1])  # the next chunk of a prompt lies behind this one
            span = Span(0, entry.num_tokens)
            follow(self._pool.devices)  # the kernels that read these rows when others had them
            rows.write(span, kv)
            return PooledChunk(self._pool, rows.runs(span), self._codec, entry, anchors)
        finally:
            rows.release()
