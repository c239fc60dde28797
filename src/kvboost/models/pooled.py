"""Stored chunks in the KV pool: K/V stays in the rows where it was computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvboost.codecs.base import Codec
from kvboost.codecs.frame import allocate, check_codec, decode, read, write
from kvboost.core import Anchor, Entry, Span
from kvboost.models.pool import BlockPool, Run
from kvboost.models.rows import Rows
from kvboost.models.upload import beside, fetched, sent

if TYPE_CHECKING:
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
        sensitivity: bytes,
        anchors: Iterable[Anchor],
    ) -> None:
        self.entry, self.sensitivity, self.rows = entry, sensitivity, rows
        self.anchors, self._pool, self._codec = tuple(anchors), pool, codec
        self.nbytes = entry.num_tokens * pool.geometry.bytes_per_token
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
        """A new frame of it."""
        with beside(self._pool.devices):
            kv = [fetched(part) for part in self.kv()]
        return write(self.entry, kv, self._codec, self.sensitivity, self.anchors)


class PooledChunks:
    """Keeps chunks in the pool (`kvboost.tiers.base.Medium`)."""

    def __init__(self, pool: BlockPool, codec: Codec) -> None:
        self._pool, self._codec = pool, codec
        self._last: int | None = None  # block of the chunk that was copied last

    def from_slots(
        self, entry: Entry, slots: Slots, span: Span, sensitivity: bytes, anchors: Iterable[Anchor]
    ) -> PooledChunk:
        """A chunk of rows of the pool, which nobody writes from now on; others are copied."""
        if isinstance(slots, Rows) and slots.pool is self._pool:
            return self._chunk(slots.runs(span), entry, sensitivity, anchors)
        return self._copy(slots.read(span), entry, sensitivity, anchors)

    def from_frame(self, frame: memoryview) -> PooledChunk:
        """A chunk of a copy of `frame`, which was checked."""
        head = read(frame)
        check_codec(head, self._codec)
        if frame.readonly:  # torch wants it writable
            frame, mapped = allocate(frame.nbytes), frame
            frame[:] = mapped
        kv = decode(frame, head, self._codec)
        return self._copy(kv, head.entry, head.sensitivity, head.anchors)

    def _copy(
        self, kv: KV, entry: Entry, sensitivity: bytes, anchors: Iterable[Anchor]
    ) -> PooledChunk:
        rows = Rows(self._pool, entry.num_tokens, after=self._last)
        try:
            self._last = int(rows.blocks[-1])  # the next chunk of a prompt lies behind this one
            span = Span(0, entry.num_tokens)
            with beside(self._pool.devices):
                rows.write(span, list(map(sent, kv, self._pool.devices)))
            return self._chunk(rows.runs(span), entry, sensitivity, anchors)
        finally:
            rows.release()

    def _chunk(
        self, rows: Sequence[Run], entry: Entry, sensitivity: bytes, anchors: Iterable[Anchor]
    ) -> PooledChunk:
        return PooledChunk(self._pool, rows, self._codec, entry, sensitivity, anchors)
