"""Which weights can come and go, in what pieces, and which of them stay within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvboost.errors import ConfigError
from kvboost.weights.carrier import Carrier, Tensors
from kvboost.weights.window import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL_BYTES = 1 << 18  # norms and biases: not worth coming and going
PIECES_IN_BUDGET = 16  # a linear layer that is larger than that part of the budget is cut
PIECES_IN_WINDOW = 4  # one in use, one that comes next, and slack for uneven sizes
ROW_MULTIPLE = 64  # of rows in a piece of a linear layer: kernels compute in blocks of rows


@dataclass(frozen=True)
class Holding:
    """A module and its large tensors: in one piece, or the weight of a linear layer in several."""

    module: torch.nn.Module
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, each once."""

    holdings: tuple[Holding, ...]
    tables: tuple[torch.nn.Embedding, ...]  # whose rows are looked up where they lie
    fixed: tuple[torch.Tensor, ...]  # in memory for good

    @property
    def pieces(self) -> list[Piece]:
        """What comes and goes, in the order of the model's modules."""
        return [piece for holding in self.holdings for piece in holding.pieces]

    @property
    def fixed_bytes(self) -> int:
        """What is in memory for good."""
        return sum(tensor.nbytes for tensor in self.fixed)


def find_layout(model: PreTrainedModel, carrier: Carrier, limit_bytes: int) -> Layout:
    """Sort the tensors of a model; linear layers above `limit_bytes` are cut."""
    holdings, tables, seen = [], [], set()
    for module in model.modules():
        own = dict(_own_tensors(module))
        large = {n: t for n, t in own.items() if t.nbytes >= SMALL_BYTES and carrier.can_drop(t)}
        if _is_cut(module, large, limit_bytes):
            large = {"weight": large["weight"]}
        seen |= {tensor.data_ptr() for tensor in large.values()}
        if not large:
            continue
        # A subclass may scale what it looks up, which is not done elsewhere.
        is_plain = type(module) is torch.nn.Embedding
        if isinstance(module, torch.nn.Embedding) and (is_plain or carrier.is_in_place):
            tables.append(module)
        else:
            holdings.append(Holding(module, tuple(large), _cut(module, large, limit_bytes)))
    every = {id(t): t for module in model.modules() for _, t in _own_tensors(module)}
    fixed = tuple(tensor for tensor in every.values() if tensor.data_ptr() not in seen)
    return Layout(tuple(holdings), tuple(tables), fixed)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _is_cut(module: torch.nn.Module, tensors: dict[str, torch.Tensor], limit_bytes: int) -> bool:
    weight = tensors.get("weight")
    return type(module) is torch.nn.Linear and weight is not None and weight.nbytes > limit_bytes


def _cut(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], limit_bytes: int
) -> tuple[Piece, ...]:
    sources: list[Tensors] = [[tensor.data for tensor in tensors.values()]]
    if _is_cut(module, tensors, limit_bytes):
        weight = tensors["weight"].data
        row_bytes = weight.nbytes // len(weight)
        num_rows = max(1, limit_bytes // row_bytes // ROW_MULTIPLE) * ROW_MULTIPLE
        sources = [[rows] for rows in torch.split(weight, num_rows)]
    return tuple(Piece(source, sum(each.nbytes for each in source)) for source in sources)


@dataclass(frozen=True)
class Plan:
    """What stays, and the room of the window in which the rest comes and goes."""

    resident: frozenset[int]
    window_bytes: int


def piece_bytes(max_weight_bytes: int) -> int:
    """How large a piece of a weight that can be cut may be."""
    return max(1, max_weight_bytes // PIECES_IN_BUDGET)


def plan(sizes: Sequence[int], fixed_bytes: int, max_weight_bytes: int) -> Plan:
    """Divide a budget between pieces in the order of use; `fixed_bytes` are held anyway.

    A forward of a dense model needs each piece once, so none is worth more than its bytes. Those
    that stay are spread evenly: while they are computed with, others can come.

    Raises:
        ConfigError: the budget is too small.
    """
    room = max_weight_bytes - fixed_bytes
    if sum(sizes) <= room:
        return Plan(frozenset(range(len(sizes))), 0)
    largest = max(sizes, default=0)
    window = max(PIECES_IN_WINDOW * piece_bytes(max_weight_bytes), 2 * largest)
    if window > room:
        least = max(fixed_bytes + 2 * largest, -(-4 * fixed_bytes // 3))
        raise ConfigError(
            f"max_weight_bytes={max_weight_bytes}: expected about {least} or more. "
            f"{fixed_bytes} bytes of this model stay in memory (small tensors, and those that were "
            "changed while they were loaded: another dtype than they are stored in, GGUF, merged "
            f"experts), and a layer of {largest} bytes must fit twice"
        )
    return Plan(frozenset(_spread(sizes, room - window)), window)


def _spread(sizes: Sequence[int], room: int) -> list[int]:
    """Pieces of at most `room` bytes in all, at even distances."""
    share, due, chosen = room / sum(sizes), 0.0, []
    for index, size in enumerate(sizes):
        due += share * size
        if due >= size and size <= room:
            chosen.append(index)
            due -= size
            room -= size
    return chosen
