"""Which tensors of a model can come and go, and in what pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvboost.weights.carrier import Brought, Carrier, Tensors
from kvboost.weights.window import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL_BYTES = 1 << 18  # norms and biases: not worth coming and going
ROW_MULTIPLE = 64  # of rows in a piece of a linear layer: kernels compute in blocks of rows

WeightPiece: TypeAlias = Piece[Tensors, Brought]


@dataclass(frozen=True)
class Holding:
    """A module and its large tensors: in one piece, or the weight of a linear layer in several."""

    module: torch.nn.Module
    names: tuple[str, ...]
    pieces: tuple[WeightPiece, ...]


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, each once."""

    holdings: tuple[Holding, ...]
    tables: tuple[torch.nn.Embedding, ...]  # whose rows are looked up where they lie
    fixed: tuple[torch.Tensor, ...]  # in memory for good

    @property
    def pieces(self) -> list[WeightPiece]:
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
) -> tuple[WeightPiece, ...]:
    sources: list[Tensors] = [[tensor.data for tensor in tensors.values()]]
    if _is_cut(module, tensors, limit_bytes):
        weight = tensors["weight"].data
        row_bytes = weight.nbytes // len(weight)
        num_rows = max(1, limit_bytes // row_bytes // ROW_MULTIPLE) * ROW_MULTIPLE
        sources = [[rows] for rows in torch.split(weight, num_rows)]
    return tuple(Piece(source, sum(each.nbytes for each in source)) for source in sources)
