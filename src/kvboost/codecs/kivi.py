"""Quantising codecs after KIVI: K in groups along the tokens, V in groups along the head's dims.

A channel of K keeps its size over the tokens, a token's V has no outlying channels: so a group has
numbers of one size. A group is stored as codes and its parameters, in the model's own dtype: the
step from one code to the next and, where there is one, the origin. A number is
origin + step * code. Codes are chosen by the parameters as they are stored, and steps are rounded
up, so that no number lies more than half a step beside its code, but for the rounding to the
model's dtype.

Numbers beyond a quarter of the dtype's largest (infinities, too) become that quarter; a NaN makes
its whole group NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvboost.codecs.base import Codec, aligned, stay

if TYPE_CHECKING:
    from kvboost.codecs.base import KV, Send
    from kvboost.core import KVGeometry

TOKENS, DIMS = 2, 3  # axes of [planes, heads, tokens, head_dim]


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the numbers of K, or of V, are cut into groups and which parameters a group has."""

    axis: int
    size: int
    has_origin: bool

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Views with one more axis: all full groups, and the rest."""
        num_full = rows.shape[self.axis] // self.size
        full, rest = rows.tensor_split([num_full * self.size], self.axis)
        shape = (*full.shape[: self.axis], num_full, self.size, *full.shape[self.axis + 1 :])
        pieces = [full.view(shape), rest.unsqueeze(self.axis)]
        return [piece for piece in pieces if piece.numel()]

    def cut_parameters(self, parameters: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """The parameters of each piece of `cut`, in the piece's shape but for the group's axis."""
        pieces = parameters.unsqueeze(self.axis + 2).tensor_split(
            [num_rows // self.size], self.axis + 1
        )
        return [piece for piece in pieces if piece.numel()]


@dataclass(frozen=True, slots=True)
class Strip:
    """Evenly spaced planes of one plane group, all K or all V: what is computed at once."""

    group: int
    planes: slice
    shape: tuple[int, int, int]  # planes, heads, head_dim
    grouping: Grouping


class KiviCodec(Codec):
    """Common code of the two widths."""

    codes: ClassVar[tuple[int, int]]  # the lowest and the highest
    keys: ClassVar[Grouping]
    values: ClassVar[Grouping]

    def __init__(self, geometry: KVGeometry) -> None:
        super().__init__(geometry)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._strips = list(_strips(geometry, self.keys, self.values))

    def size(self, num_tokens: int) -> int:
        """Parameters and codes of each strip, aligned."""
        return sum(
            aligned(math.prod(shape) * self.geometry.itemsize) + aligned(num_bytes)
            for shape, num_bytes in (self._sizes(strip, num_tokens) for strip in self._strips)
        )

    def encode(self, kv: KV, payload: memoryview) -> None:
        """Find each group's parameters, then its codes; the bytes between sections are zeros."""
        torch.frombuffer(payload, dtype=torch.uint8).zero_()
        for strip, parameters, packed in self._sections(payload, kv[0].shape[TOKENS]):
            rows = kv[strip.group][strip.planes]
            exact = rows.to(torch.promote_types(self._dtype, torch.float32), copy=True)
            grouping = strip.grouping
            stored = grouping.cut_parameters(parameters, rows.shape[grouping.axis])
            for piece, target in zip(grouping.cut(exact), stored, strict=True):
                self._quantise(piece, target, grouping)
            self._pack(exact, packed)

    def decode(self, payload: memoryview, num_tokens: int, send: Send = stay) -> KV:
        """New tensors: the codes, then in place what they stand for."""
        kv: list[torch.Tensor] = []
        for strip, parameters, packed in self._sections(payload, num_tokens, send):
            group = self.geometry.groups[strip.group]
            if strip.group == len(kv):  # its first strip
                shape = len(group.planes), group.heads, num_tokens, group.head_dim
                kv.append(parameters.new_empty(shape))
            rows, grouping = kv[strip.group][strip.planes], strip.grouping
            rows.copy_(self._unpack(packed, rows.shape))
            stored = grouping.cut_parameters(parameters, rows.shape[grouping.axis])
            for piece, (step, *origin) in zip(grouping.cut(rows), stored, strict=True):
                _dequantise(piece, step, *origin)
        return kv

    def _quantise(self, piece: torch.Tensor, target: torch.Tensor, grouping: Grouping) -> None:
        """Replace numbers by their codes, in place; their parameters go to `target`."""
        limits = torch.finfo(self._dtype)
        largest = limits.max / 4
        low = piece.amin(grouping.axis + 1, keepdim=True).clamp_(-largest, largest)
        high = piece.amax(grouping.axis + 1, keepdim=True).clamp_(-largest, largest)
        lowest, highest = self.codes
        if grouping.has_origin:
            origin = (low if lowest == 0 else (low + high) / 2).to(self._dtype)
            target[1] = origin
            low, high = low - origin, high - origin
            piece.sub_(origin)
        reach = torch.maximum(high, -low) / highest
        # Up by a unit of the dtype: rounding down would cut the group's ends off. Never zero.
        smallest = max(limits.tiny * limits.eps, torch.finfo(torch.float32).tiny)
        step = (reach * (1 + limits.eps) + smallest).to(self._dtype)
        target[0] = step
        piece.div_(step).round_().clamp_(lowest, highest)

    def _sections(
        self, payload: memoryview, num_tokens: int, send: Send = stay
    ) -> Iterator[tuple[Strip, torch.Tensor, torch.Tensor]]:
        """Each strip with views of its parameters and of its codes' bytes."""
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        cursor = 0
        for strip in self._strips:
            shape, num_bytes = self._sizes(strip, num_tokens)
            size = math.prod(shape) * self.geometry.itemsize
            start = aligned(size)  # of the codes
            section = send(whole[cursor : cursor + start + num_bytes], strip.group)
            yield strip, section[:size].view(self._dtype).view(shape), section[start:]
            cursor += start + aligned(num_bytes)

    def _sizes(self, strip: Strip, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """Shape of a strip's parameters, bytes of its codes."""
        planes, heads, head_dim = strip.shape
        shape = [planes, heads, num_tokens, head_dim]
        num_bytes = self._code_bytes(math.prod(shape))
        grouping = strip.grouping
        shape[grouping.axis] = -(-shape[grouping.axis] // grouping.size)
        return (1 + grouping.has_origin, *shape), num_bytes

    def _code_bytes(self, num_codes: int) -> int:
        raise NotImplementedError

    def _pack(self, codes: torch.Tensor, packed: torch.Tensor) -> None:
        raise NotImplementedError

    def _unpack(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        raise NotImplementedError


class Int8Codec(KiviCodec):
    """A byte a number: half the size, and no more noise than bf16 has itself."""

    number = 1
    codes = (-127, 127)
    keys = Grouping(TOKENS, 128, has_origin=True)
    values = Grouping(DIMS, 128, has_origin=False)

    def _code_bytes(self, num_codes: int) -> int:
        return num_codes

    def _pack(self, codes: torch.Tensor, packed: torch.Tensor) -> None:
        packed.view(torch.int8).view(codes.shape).copy_(codes)

    def _unpack(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return packed.view(torch.int8).view(shape)


class Int4Codec(KiviCodec):
    """Two numbers a byte: the codes' first half in the low bits, the second in the high ones."""

    number = 2
    codes = (0, 15)
    keys = Grouping(TOKENS, 64, has_origin=True)
    values = Grouping(DIMS, 64, has_origin=True)

    def _code_bytes(self, num_codes: int) -> int:
        return -(-num_codes // 2)

    def _pack(self, codes: torch.Tensor, packed: torch.Tensor) -> None:
        # By way of int8: the conversion to uint8 is three times slower.
        flat = codes.to(torch.int8).view(torch.uint8).flatten()
        first, second = flat.tensor_split([len(packed)])
        packed.copy_(first)
        packed[: len(second)] |= second << 4

    def _unpack(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        codes = packed.new_empty(2 * len(packed))
        torch.bitwise_and(packed, 15, out=codes[: len(packed)])
        torch.bitwise_right_shift(packed, 4, out=codes[len(packed) :])
        return codes[: shape.numel()].view(shape)


def _dequantise(
    piece: torch.Tensor, step: torch.Tensor, origin: torch.Tensor | None = None
) -> None:
    """Replace codes by the numbers they stand for, in place."""
    if origin is None:
        piece.mul_(step)
    elif step.shape[-1] == 1:  # addcmul is not vectorised where two operands are spread
        piece.mul_(step).add_(origin)
    else:
        torch.addcmul(origin, piece, step, out=piece)


def _strips(geometry: KVGeometry, keys: Grouping, values: Grouping) -> Iterator[Strip]:
    for number, group in enumerate(geometry.groups):
        for parity, grouping in enumerate((keys, values)):
            indices = [index for index, p in enumerate(group.planes) if p % 2 == parity]
            for planes in _slices(indices):
                shape = (len(range(len(group.planes))[planes]), group.heads, group.head_dim)
                yield Strip(number, planes, shape, grouping)


def _slices(indices: list[int]) -> Iterator[slice]:
    """Ascending numbers as few evenly spaced slices: one for all models that are known."""
    while indices:
        pace = indices[1] - indices[0] if len(indices) > 1 else 1
        count = next(
            (i for i, index in enumerate(indices) if index != indices[0] + i * pace), len(indices)
        )
        yield slice(indices[0], indices[count - 1] + 1, pace)
        indices = indices[count:]
