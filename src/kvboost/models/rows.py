"""The K/V of one request in the batch: rows of its own, on top of rows that it shares."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from kvboost.core import Span
from kvboost.models.slots import SlotCache

if TYPE_CHECKING:
    from kvboost.codecs.base import KV
    from kvboost.models.arena import Arena


class SharedRows:
    """The first rows of a prompt, read by all requests that begin with it; never written."""

    def __init__(self, slots: SlotCache, num_rows: int) -> None:
        self.num_rows = num_rows
        self._slots = slots.head(num_rows)
        self._heads: WeakValueDictionary[int, SharedRows] = WeakValueDictionary()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer."""
        layer = self._slots.layers[index]
        return layer.keys, layer.values

    def read(self, span: Span) -> KV:
        """The rows of `span`, as views."""
        return self._slots.read(span)

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of the buffer that they lie in, by its place in memory."""
        return self._slots.buffers()

    def head(self, num_rows: int) -> SharedRows:
        """The first of these rows; the same object for all who ask for as many."""
        if num_rows == self.num_rows:
            return self
        return self._heads.setdefault(num_rows, SharedRows(self._slots, num_rows))


class Rows:
    """Positions from 0 on: `shared` first, then `own`. Only own rows are written."""

    def __init__(self, own: SlotCache, shared: SharedRows | None = None) -> None:
        self.own, self.shared = own, shared
        self._whole = (
            own if shared is None else None
        )  # in whose buffer all rows lie, shared ones too

    @property
    def num_shared(self) -> int:
        """Rows that others may read too."""
        return 0 if self.shared is None else self.shared.num_rows

    @property
    def length(self) -> int:
        """Rows that are filled, or lie before one that is."""
        return self.num_shared + self.own.length

    @property
    def exact_stop(self) -> int:
        """Rows before this one are exact; the others have something moved below them."""
        return self.num_shared + self.own.exact_stop

    @exact_stop.setter
    def exact_stop(self, stop: int) -> None:
        self.own.exact_stop = stop - self.num_shared

    @property
    def num_shareable(self) -> int:
        """The most that `share` can give: what is in one buffer with the first row."""
        whole = self._whole
        is_there = whole is not None and self.own.capacity == whole.capacity - self.num_shared
        return self.length if is_there else self.num_shared

    def share(self, num_rows: int, arena: Arena) -> SharedRows:
        """Let others read the first rows; at most `num_rows`, less if not so many can be shared.

        If little room is left for rows of its own, they go to the arena.
        """
        num_rows, num_before = min(num_rows, self.num_shareable), self.num_shared
        if self.shared is not None and num_rows <= num_before:
            return self.shared.head(num_rows)
        assert self._whole is not None
        self.shared = SharedRows(self._whole, num_rows)
        self.own = self.own.tail(num_rows - num_before)
        if self.own.capacity <= arena.most_rows:
            self._whole = None
            rest = arena.take(self.own.length + 1)
            rest.exact_stop = self.own.exact_stop
            if self.own.length:
                own = Span(0, self.own.length)
                rest.write(own, self.own.read(own))
            self.own = rest
        return self.shared

    def read(self, span: Span) -> KV:
        """The rows of `span`; a copy where they lie in two places."""
        border = self.num_shared
        if self.shared is None or span.start >= border:
            return self.own.read(Span(span.start - border, span.stop - border))
        if span.stop <= border:
            return self.shared.read(span)
        first = self.shared.read(Span(span.start, border))
        rest = self.own.read(Span(0, span.stop - border))
        return [torch.cat(parts, dim=2) for parts in zip(first, rest, strict=True)]

    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span` that are our own."""
        skipped = max(0, self.num_shared - span.start)
        if skipped < len(span):
            own = Span(span.start + skipped - self.num_shared, span.stop - self.num_shared)
            self.own.write(own, [part[:, :, skipped:] for part in kv])

    def joined(self) -> SlotCache:
        """All rows in one buffer; a copy if some are shared."""
        if self.shared is None:
            return self.own
        whole = self.own.like(self.length)
        whole.write(Span(0, self.length), self.read(Span(0, self.length)))
        whole.exact_stop = self.exact_stop
        return whole

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of each buffer that it needs, by the buffer's place in memory."""
        shared = {} if self.shared is None else self.shared.buffers()
        return self.own.buffers() | shared
