"""vLLM's paged K/V and the layout of its blocks.

Each attention back end of vLLM arranges its blocks in its own way (some pack K for matrix
instructions), but all have one operation that writes rows into blocks. It is given rows of known
numbers; where these turn up is the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvboost.core import KVGeometry, PlaneGroup
from kvboost.errors import UnsupportedModel

# Whole numbers up to these are exact in every dtype, or in every one of 16 bits and more.
BASE_OF_CODES, BASE = 8, 128
# vLLM's names of one-byte K/V: codes, which stand for their value times a scale of the layer.
CODES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

MOST_PACKED = 4  # numbers side by side in packed blocks
WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

Axes = tuple[tuple[int, int], ...]
Bytes: TypeAlias = npt.NDArray[np.uint8]
WriteRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes K and V [tokens, heads, head_dim] into a layer's blocks at slots."""


@dataclass(frozen=True)
class Strides:
    """K or V of a block as a view: (size, stride) of its axes, outermost first.

    Packed blocks cut tokens or a head's dimensions into groups, which are axes of their own.
    """

    first: int
    heads: Axes
    tokens: Axes
    dims: Axes

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """A view [layers, heads, blocks, tokens, head_dim] of blocks [layers, blocks, numbers]."""
        layers, blocks = zip(rows.shape[:2], rows.stride()[:2], strict=True)
        axes = layers, *self.heads, blocks, *self.tokens, *self.dims
        sizes, strides = zip(*axes, strict=True)
        return rows.as_strided(sizes, strides, rows.storage_offset() + self.first)


@dataclass(frozen=True)
class Layout:
    """How to read blocks, whichever way they are written."""

    block_dim: int  # of a layer's tensor: which of its dimensions counts blocks
    places: torch.Tensor  # [2, heads, block_size, head_dim]: where in a block each number lies
    strides: tuple[Strides, Strides]  # the same for K and V, as views of a block

    def read(self, caches: Sequence[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
        """K and V [2 * layers, heads, tokens, head_dim] of all tokens in blocks of layers."""
        first, count, dim = caches[0], len(blocks), self.block_dim
        planes = self._planes(first, len(caches), count)
        # On a CPU layer by layer, within a core's cache; on a GPU all at once, in few launches.
        step = 1 if first.device.type == "cpu" else len(caches)
        picked = first.new_empty(step, *first.shape[:dim], count, *first.shape[dim + 1 :])
        for start in range(0, len(caches), step):
            for number in range(step):
                torch.index_select(caches[start + number], dim, blocks, out=picked[number])
            rows = picked.movedim(dim + 1, 1).reshape(step, count, -1)
            self._unpack(rows, planes[start : start + step])
        return planes.flatten(0, 1)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """K and V [2 * layers, heads, tokens, head_dim] of blocks [layers, blocks, numbers]."""
        planes = self._planes(rows, *rows.shape[:2])
        for layer in range(len(rows)):
            self._unpack(rows[layer : layer + 1], planes[layer : layer + 1])
        return planes.flatten(0, 1)

    def fill(self, cache: torch.Tensor, block: int, rows: torch.Tensor) -> None:
        """Write K and V [2, heads, tokens, head_dim] of a block whose numbers lie together."""
        numbers = cache.select(self.block_dim, block).view(1, 1, -1)
        for strides, part in zip(self.strides, rows, strict=True):
            view = strides.view(numbers)
            _copy(view, part.reshape(view.shape))

    def _planes(self, like: torch.Tensor, num_layers: int, num_blocks: int) -> torch.Tensor:
        _, heads, size, head_dim = self.places.shape
        return like.new_empty(num_layers, 2, heads, num_blocks * size, head_dim)

    def _unpack(self, rows: torch.Tensor, planes: torch.Tensor) -> None:
        for kind, strides in enumerate(self.strides):
            view = strides.view(rows)
            _copy(planes[:, kind].view(view.shape), view)

    def pick(
        self, cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """K and V [2, heads, tokens, head_dim] of single tokens, each at an offset of a block."""
        outer = cache.movedim(self.block_dim, 0)
        inner = torch.unravel_index(self.places[:, :, offsets], outer.shape[1:])
        picked: torch.Tensor = outer[(blocks[None, None, :, None], *inner)]
        return picked


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy numbers between a view of blocks and one of rows.

    Packed blocks have two or four numbers side by side. If rows have them so too, they are copied
    as one number; if not, one after the other, since torch is slow with an inner loop that short.
    """
    for axis, size in enumerate(target.shape):
        in_target, in_source = target.stride(axis), source.stride(axis)
        if not 1 < size <= MOST_PACKED or 1 not in (in_target, in_source):
            continue
        if in_target != in_source:
            for number in range(size):
                target.select(axis, number).copy_(source.select(axis, number))
            return
        wide = WIDE.get(size * target.itemsize)
        if wide is not None and all(_is_aligned(view, size) for view in (target, source)):
            target.view(wide).copy_(source.view(wide))
            return
    target.copy_(source)


def _is_aligned(view: torch.Tensor, size: int) -> bool:
    """Whether its innermost numbers can be taken `size` at a time."""
    places = view.storage_offset(), *view.stride()[:-1]
    return view.stride(-1) == 1 and not any(place % size for place in places)


def learn_layout(
    cache: torch.Tensor,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    heads: int,
    head_dim: int,
    put: WriteRows,
) -> Layout:
    """Detect a layout by writing numbered rows into a small copy of a layer's blocks.

    `dtype`: what the bytes of `cache` are.

    Raises:
        UnsupportedModel: they did not come out as they went in.
    """
    if num_blocks not in cache.shape[:2]:
        raise UnsupportedModel(f"vLLM keeps its K/V in a tensor of shape {tuple(cache.shape)}")
    block_dim = cache.shape.index(num_blocks)
    small = torch.zeros_like(cache.narrow(block_dim, 0, 2))
    shape = (2, heads, block_size, head_dim)
    numbers = torch.arange(2 * heads * block_size * head_dim, device=cache.device).view(shape)
    slots = torch.arange(block_size, 2 * block_size, device=cache.device)  # of the second block
    found = torch.zeros(small.numel() // 2, dtype=torch.int64, device=cache.device)
    scale, base = 1, BASE_OF_CODES if dtype.itemsize == 1 else BASE
    while scale < numbers.numel():
        rows = (numbers // scale % base + 1).to(dtype).transpose(1, 2)
        put(rows[0].contiguous(), rows[1].contiguous(), small, slots)
        digits = small.select(block_dim, 1).reshape(-1).view(dtype).float() - 1
        found += digits.to(torch.int64) * scale
        scale *= base
    places = found.argsort()
    if found.numel() != numbers.numel() or not torch.equal(found[places], numbers.reshape(-1)):
        raise UnsupportedModel(f"vLLM's blocks {tuple(cache.shape)} do not hold K/V as written")
    places = places.view(shape)
    return Layout(block_dim, places, (_strides(places[0]), _strides(places[1])))


def _strides(places: torch.Tensor) -> Strides:
    """Of places [heads, tokens, head_dim].

    Raises:
        UnsupportedModel: they have none.
    """
    first = places[0, 0, 0]
    heads, tokens, dims = places[:, 0, 0] - first, places[0, :, 0] - first, places[0, 0] - first
    if not torch.equal(places, first + heads[:, None, None] + tokens[:, None] + dims):
        raise UnsupportedModel("vLLM's blocks hold K/V in no regular order")
    return Strides(int(first), *(_axes(each.tolist()) for each in (heads, tokens, dims)))


def _axes(places: Sequence[int]) -> Axes:
    """A dimension as axes of a view, by where each of its numbers lies."""
    if len(places) == 1:
        return ()
    stride = places[1]
    run = next((n for n, at in enumerate(places) if at != n * stride), len(places))
    outer = places[::run]
    regular = [start + n * stride for start in outer for n in range(run)]
    if places != regular:
        raise UnsupportedModel("vLLM's blocks hold K/V in no regular order")
    return *_axes(outer), (run, stride)


class PagedCache:
    """The blocks of all layers: read and written as rows, a plane each for K and V."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        num_layers: int,
        num_blocks: int,
        block_size: int,
        computed: torch.dtype,
    ) -> None:
        """Learn how the attention `layers`, by name and in their order, arrange their blocks.

        `computed`: the dtype of K/V before it is cached.

        Raises:
            UnsupportedModel: they keep something other than K and V of one shape.
        """
        self.names, self.layers = list(layers), list(layers.values())
        self.block_size = block_size
        first = self.layers[0]
        shapes = {(layer.num_kv_heads, layer.head_size) for layer in self.layers}
        tensors = {(tuple(layer.kv_cache.shape), layer.kv_cache.dtype) for layer in self.layers}
        if len(shapes) > 1 or len(tensors) > 1 or len(self.layers) != num_layers:
            raise UnsupportedModel("its layers keep K/V of different shapes, or none")
        self.device: torch.device = first.kv_cache.device
        self._computed = computed
        self.dtype: torch.dtype = CODES.get(first.kv_cache_dtype, first.kv_cache.dtype)
        if not self.dtype.is_floating_point:
            raise UnsupportedModel(f"its K/V has the format {first.kv_cache_dtype}")
        (shape,) = shapes
        self.geometry = KVGeometry(
            num_layers=num_layers,
            groups=(PlaneGroup(tuple(range(2 * num_layers)), *shape),),
            dtype=str(self.dtype).removeprefix("torch."),
            itemsize=self.dtype.itemsize,
        )
        self._layout = learn_layout(
            first.kv_cache,
            self.dtype,
            num_blocks,
            block_size,
            *shape,
            lambda *rows: self._put(first, *rows),
        )

    @property
    def is_quantised(self) -> bool:
        """Whether cached K/V has fewer bits than computed K/V."""
        return self.dtype in CODES.values()

    @cached_property
    def fills_blocks(self) -> bool:
        """Whether a whole block can be copied: on a CPU, where its numbers lie together."""
        block = self.layers[0].kv_cache.select(self._layout.block_dim, 0)
        return self.device.type == "cpu" and bool(block.is_contiguous())

    @cached_property
    def block_bytes(self) -> Sequence[Bytes]:
        """The blocks [blocks, bytes] of each layer; only where `fills_blocks`."""
        outer = (layer.kv_cache.movedim(self._layout.block_dim, 0) for layer in self.layers)
        return [each.view(len(each), -1).view(torch.uint8).numpy() for each in outer]

    def unpack(self, blocks: Bytes) -> torch.Tensor:
        """K and V [planes, heads, tokens, head_dim] of copies of blocks [layers, blocks, bytes]."""
        return self._layout.unpack(torch.from_numpy(blocks).view(self.dtype))

    def fill(self, block: int, planes: torch.Tensor) -> None:
        """Write K and V [planes, heads, tokens, head_dim] of a whole block of all layers."""
        for number, layer in enumerate(self.layers):
            rows = planes[2 * number : 2 * number + 2].view(layer.kv_cache.dtype)
            self._layout.fill(layer.kv_cache, block, rows)

    def slots(self, block_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Where rows at positions of a request lie, as vLLM counts."""
        blocks = torch.tensor(block_ids, device=self.device)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def put(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V [2, tokens, heads, head_dim] of a layer."""
        attention = self.layers[layer]
        self._put(attention, rows[0].contiguous(), rows[1].contiguous(), attention.kv_cache, slots)

    def take(self, block_ids: torch.Tensor) -> torch.Tensor:
        """K and V [planes, heads, tokens, head_dim] of all tokens in blocks."""
        caches = [layer.kv_cache for layer in self.layers]
        return self._layout.read(caches, block_ids).view(self.dtype)

    def pick(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """K and V [2, heads, tokens, head_dim] of a layer, of single tokens."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return self._layout.pick(self.layers[layer].kv_cache, blocks, offsets)

    def _put(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        if self.is_quantised:  # vLLM divides by the scale and rounds: to the same codes
            key, value = (
                (rows.float() * scale.view(-1, 1)).to(self._computed)
                for rows, scale in ((key, layer._k_scale), (value, layer._v_scale))  # noqa: SLF001
            )
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
