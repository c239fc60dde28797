"""The K/V of one request in the batch: rows of its own, on top of rows that it shares."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from kvboost.core import Span
from kvboost.models.slots import KeyValue, RowCache

if TYPE_CHECKING:
    from kvboost.codecs.base import KV


class SharedRows:
    """The first rows of a prompt, read by all requests that begin with it; never written."""

    def __init__(self, slots: RowCache, num_rows: int) -> None:
        self.num_rows = num_rows
        self.slots = slots.head(num_rows)
        self._heads: WeakValueDictionary[int, SharedRows] = WeakValueDictionary()

    def layer(self, index: int) -> KeyValue:
        """K and V of a layer."""
        return self.slots.layer_rows(index, self.num_rows)

    def read(self, span: Span) -> KV:
        """The rows of `span`, not to be written."""
        return self.slots.read(span)

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of the buffer that they lie in, by its place in memory."""
        return self.slots.buffers()

    def hold(self) -> None:
        """Count one more request that reads them."""
        self.slots.hold()

    def release(self) -> None:
        """Count one less."""
        self.slots.release()

    def head(self, num_rows: int) -> SharedRows:
        """The first of these rows; the same object for all who ask for as many."""
        if num_rows == self.num_rows:
            return self
        return self._heads.setdefault(num_rows, SharedRows(self.slots, num_rows))


class Rows:
    """Positions from 0 on: `shared` first, then `own`. Only own rows are written."""

    def __init__(self, own: RowCache, shared: SharedRows | None = None) -> None:
        self.own, self.shared = own, shared
        if shared is not None:
            shared.hold()

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
        """The most that `share` can give: what can be read together with the first row."""
        if self.shared is None or self.own.follows(self.shared.slots):
            return self.length
        return self.num_shared

    def share(self, num_rows: int) -> SharedRows:
        """Let others read the first rows; at most `num_rows`, less if not so many can be shared."""
        num_rows, num_before = min(num_rows, self.num_shareable), self.num_shared
        if self.shared is not None and num_rows <= num_before:
            return self.shared.head(num_rows)
        before = self.shared
        whole = self.own if before is None else self.own.whole(before.slots)
        self.shared = SharedRows(whole, num_rows)
        self.shared.hold()
        if before is not None:
            before.release()
        self.own = self.own.tail(num_rows - num_before)
        return self.shared

    def read(self, span: Span) -> KV:
        """The rows of `span`: views, or copies where they lie in several places."""
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

    def joined(self) -> RowCache:
        """All rows in one cache; a copy if some are shared."""
        if self.shared is None:
            return self.own
        whole = self.own.like(self.length)
        whole.write(Span(0, self.length), self.read(Span(0, self.length)))
        whole.exact_stop = self.exact_stop
        return whole

    def close(self) -> None:
        """Give the rows back, once; others go on reading what they share."""
        self.own.release()
        if self.shared is not None:
            self.shared.release()

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of each buffer that it needs, by the buffer's place in memory."""
        shared = {} if self.shared is None else self.shared.buffers()
        return self.own.buffers() | shared
