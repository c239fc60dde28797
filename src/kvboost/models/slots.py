"""The slot cache: a Transformers `Cache` over preallocated rows that can be written in any order.

Transformers' own dynamic cache copies the whole cache for every token; here a step writes its
rows in place and hands attention a view.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.core import KVGeometry, Span
from kvboost.models import spread

if TYPE_CHECKING:
    from kvboost.codecs.base import KV


@dataclass(frozen=True)
class Behind:
    """Tokens before `length` that the next forward shall compute besides those it is given."""

    tokens: torch.Tensor
    positions: torch.Tensor


KeyValue: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each [batch, heads, rows, head_dim]."""

RowObserver = Callable[[int, KeyValue, KeyValue], None]
"""Called with a layer, its fresh K and V, and its stored K and V of all visible rows."""


class SlotLayer(CacheLayerMixin):
    """One layer's view of the rows; all state lives in the cache."""

    is_sliding = False  # rows are kept for the whole sequence; the mask applies the window
    is_croppable = True

    def __init__(self, cache: RowCache, index: int) -> None:
        super().__init__()
        # Weak, so that buffers are freed when the last reference to their cache is gone.
        self._cache_ref, self._index = weakref.ref(cache), index
        self.is_initialized = True

    @property
    def _cache(self) -> RowCache:
        cache = self._cache_ref()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: buffers exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Write the new rows; return all visible ones."""
        visible = self.write(key_states, value_states)
        return self._cache.layer_rows(self._index, visible)

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Write the new rows; how many are visible."""
        cache, index, fresh = self._cache, self._index, (key_states, value_states)
        visible = cache.visible_after(key_states.shape[2])
        cache.make_room(visible)
        if cache.observer is not None:
            cache.observer(index, fresh, cache.layer_rows(index, visible))
        if cache.scattered is None:
            cache.put(index, cache.length, fresh)
        else:
            stored = cache.layer_rows(index, visible)
            for rows, new in zip(stored, fresh, strict=True):
                for patch in cache.patches:
                    spread.apply(patch, rows, new)
                rows.index_copy_(2, cache.scattered, new)
            cache.put(index, 0, stored)  # of views nothing is copied
        if self is cache.last_layer:
            cache.length, cache.scattered, cache.patches = visible, None, []
        return visible

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Visible rows and the first of them."""
        return self._cache.visible_after(query_length), 0

    def get_seq_length(self) -> int:
        """Rows before the next appended token."""
        return self._cache.length

    def get_max_length(self) -> int:
        """No limit: room is made as it is needed."""
        return -1


class RowCache(Cache, ABC):
    """Rows of K/V for the positions of a sequence; where they lie is the subclass's matter.

    By default a forward appends after `length`. `scatter` makes the next forward write (and
    mask) at positions of its own.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self._geometry, self.device = geometry, device
        self.dtype = getattr(torch, geometry.dtype)
        self.capacity = 0
        self.length = 0
        self.exact_stop = sys.maxsize
        self.scattered: torch.Tensor | None = None
        self.behind: Behind | None = None
        self.patches: list[spread.Patch] = []
        self.observer: RowObserver | None = None  # sees each layer's fresh rows before they go in
        self._scattered_stop = 0
        layers = [SlotLayer(self, index) for index in range(geometry.num_layers)]
        super().__init__(layers=layers)
        self.last_layer = layers[max(p for group in geometry.groups for p in group.planes) // 2]

    @property
    def batch_size(self) -> int:
        """Sequences in it."""
        return 1

    @abstractmethod
    def make_room(self, num_rows: int) -> None:
        """Let the next forward write its rows, and have so many in all."""

    @abstractmethod
    def layer_rows(self, layer: int, num_rows: int) -> KeyValue:
        """The first rows of a layer: views, or copies to be `put` back."""

    @abstractmethod
    def put(self, layer: int, first: int, fresh: KeyValue) -> None:
        """Write rows of a layer from `first` on, where room was made."""

    @abstractmethod
    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span`."""

    @abstractmethod
    def read(self, span: Span) -> KV:
        """The rows of `span` of the first sequence: views, or copies to be written back."""

    @abstractmethod
    def head(self, num_rows: int) -> RowCache:
        """The first rows, as a cache over the same memory."""

    @abstractmethod
    def tail(self, num_before: int) -> RowCache:
        """All rows from `num_before` on, as a cache over the same memory that counts from there.

        It takes the place of this one, which must not be used any more.
        """

    @abstractmethod
    def follows(self, before: RowCache) -> bool:
        """Whether its rows can be read together with those of `before`, which stand before them."""

    @abstractmethod
    def whole(self, before: RowCache) -> RowCache:
        """The rows of `before` and its own, which must follow them, as one cache."""

    @abstractmethod
    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of each piece of memory below it, by its place."""

    def hold(self) -> None:
        """Keep its memory until one more `release`."""

    def release(self) -> None:
        """Give its memory back; by default that is left to Python."""

    def like(self, capacity: int) -> SlotCache:
        """An empty one of the same shape in a buffer of its own."""
        return SlotCache(self._geometry, capacity, self.device)

    def scatter(self, positions: Sequence[int]) -> None:
        """Let the next forward write its rows at `positions`, in that order."""
        self.scattered = torch.tensor(positions, device=self.device)
        self._scattered_stop = max(positions) + 1

    def correct(self, runs: Iterable[Span], positions: Sequence[int]) -> None:
        """Let the next forward, of `positions`, also correct the other rows of the moved `runs`."""
        self.patches = spread.patches(runs, positions, self.dtype, self.device)

    def visible_after(self, num_queries: int) -> int:
        """Rows that a forward of `num_queries` tokens can see, its own included."""
        if self.scattered is None:
            return self.length + num_queries
        return max(self.length, self._scattered_stop)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """What to add to a query's index to get its position.

        Transformers adds this to arange(num_queries) when it builds any mask. A tensor of
        differences puts each scattered query at its own position, so that every kind of mask
        (causal, sliding, chunked) comes out right without knowing the model.
        """
        if self.scattered is None:
            return self.length
        return self.scattered - torch.arange(len(self.scattered), device=self.scattered.device)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (Transformers counts them as a negative)."""
        self.length -= abs(tokens_to_remove)


class SlotCache(RowCache):
    """Rows in one buffer, of one sequence, or of several once beams are expanded."""

    def __init__(
        self, geometry: KVGeometry, capacity: int, device: torch.device, batch_size: int = 1
    ) -> None:
        super().__init__(geometry, device)
        self.capacity = capacity
        self._whole: SlotCache | None = None  # whose `tail` it is, until it grows
        # Each [planes, batch, heads, capacity, head_dim]. Rows that were not written yet may lie
        # behind a mask, where they must be numbers.
        self._buffers = [
            torch.zeros(
                (len(group.planes), batch_size, group.heads, capacity, group.head_dim),
                dtype=self.dtype,
                device=device,
            )
            for group in geometry.groups
        ]
        self._hand_out_views()

    @property
    def batch_size(self) -> int:
        """Sequences in the buffers."""
        return self._buffers[0].shape[1]

    def layer_rows(self, layer: int, num_rows: int) -> KeyValue:
        """The first rows of a layer, as views."""
        views = self.layers[layer]
        return views.keys[:, :, :num_rows], views.values[:, :, :num_rows]

    def put(self, layer: int, first: int, fresh: KeyValue) -> None:
        """Write rows of a layer from `first` on, where room was made."""
        views, stop = self.layers[layer], first + fresh[0].shape[2]
        views.keys[:, :, first:stop].copy_(fresh[0])
        views.values[:, :, first:stop].copy_(fresh[1])

    def reuse(self) -> SlotCache:
        """Forget the content and start over in the same memory."""
        self.length, self.scattered, self.behind, self.patches = 0, None, None, []
        self.exact_stop = sys.maxsize
        return self

    def head(self, num_rows: int) -> SlotCache:
        """The first rows, as a cache over the same memory."""
        return self._part((*[slice(None)] * 3, slice(0, num_rows)), num_rows)

    def tail(self, num_before: int) -> SlotCache:
        """All rows from `num_before` on, as a cache over the same memory that counts from there."""
        rows = (*[slice(None)] * 3, slice(num_before, None))
        rest = self._part(rows, self.length - num_before)
        rest.exact_stop = self.exact_stop - num_before
        rest._whole = self._whole or self  # noqa: SLF001
        return rest

    def follows(self, before: RowCache) -> bool:
        """Whether it still lies behind `before`."""
        return self._whole is not None

    def whole(self, before: RowCache) -> SlotCache:
        """All rows of the buffer that both lie in."""
        assert self._whole is not None
        return self._whole

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Bytes and rows of the memory below it, by its place; parts of a cache lie in one."""
        sizes = [buffer.untyped_storage().nbytes() for buffer in self._buffers]
        per_token = self._geometry.bytes_per_token * self.batch_size
        place = self._buffers[0].untyped_storage().data_ptr()
        return {place: (sum(sizes), sum(sizes) // per_token)}

    def _part(self, which: tuple[slice, ...], length: int) -> SlotCache:
        part = self.like(0)
        part._buffers = [buffer[which] for buffer in self._buffers]  # noqa: SLF001
        part.capacity, part.length = part._buffers[0].shape[3], length  # noqa: SLF001
        part._hand_out_views()  # noqa: SLF001
        return part

    def write(self, span: Span, kv: KV) -> None:
        """Copy the first `len(span)` tokens of `kv` to the rows of `span`."""
        self.length = max(self.length, span.stop)
        for buffer, source in zip(self._buffers, kv, strict=True):
            buffer[:, 0, :, span.start : span.stop].copy_(source[:, :, : len(span)])

    def read(self, span: Span) -> KV:
        """The rows of `span` of the first sequence, as views."""
        return [buffer[:, 0, :, span.start : span.stop] for buffer in self._buffers]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Copy each sequence for beams or several answers."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these sequences of the batch."""
        for place, old in enumerate(self._buffers):
            used = old[:, :, :, : self.length].index_select(1, indices.to(old.device))
            shape = (old.shape[0], len(indices), *old.shape[2:])
            self._buffers[place] = torch.empty(shape, dtype=old.dtype, device=old.device)
            self._buffers[place][:, :, :, : self.length].copy_(used)
        self._hand_out_views()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each beam go on from the beam it was chosen from."""
        for buffer in self._buffers:
            used = buffer[:, :, :, : self.length]
            used.copy_(used.index_select(1, beam_idx.to(buffer.device)))

    def reset(self) -> None:
        """Forget everything."""
        self.reuse()

    def make_room(self, num_rows: int) -> None:
        """Move to larger buffers if there are fewer rows."""
        if num_rows <= self.capacity:
            return
        capacity = max(num_rows, 2 * self.capacity)
        for place, old in enumerate(self._buffers):
            shape = (*old.shape[:3], capacity, old.shape[4])
            self._buffers[place] = torch.zeros(shape, dtype=old.dtype, device=old.device)
            self._buffers[place][:, :, :, : self.capacity].copy_(old)
        self.capacity, self._whole = capacity, None
        self._hand_out_views()

    def _hand_out_views(self) -> None:
        for group, buffer in zip(self._geometry.groups, self._buffers, strict=True):
            for place, plane in enumerate(group.planes):
                layer = self.layers[plane // 2]
                if plane % 2 == 0:
                    layer.keys = buffer[place]
                else:
                    layer.values = buffer[place]
