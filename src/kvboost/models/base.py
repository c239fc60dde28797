"""The contracts of stages with a model and with the K/V of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvboost.core import KVGeometry, Rotation, Span

if TYPE_CHECKING:
    import torch

    from kvboost.codecs.base import KV
    from kvboost.tiers.base import StoredChunk


class Slots(Protocol):
    """The K/V of one sequence, a row for each position, rows filled in any order."""

    exact_stop: int  # rows before this one are exact; the others have something moved below them

    def place(self, span: Span, chunk: StoredChunk, offset: int) -> None:
        """Copy tokens of a stored chunk from `offset` on to the rows of `span`."""

    def read(self, span: Span) -> KV:
        """The rows of `span`: views or copies."""

    def turn(self, span: Span, change: Callable[[KV], None]) -> None:
        """Change the rows of `span` in place, a part at a time."""


class ModelFacts(Protocol):
    """What placing K/V needs to know of a model."""

    @property
    def geometry(self) -> KVGeometry:
        """The shape of this model's K/V."""

    @property
    def rotations(self) -> Mapping[int, Rotation | None]:
        """Per plane, how it rotates with position; empty if that could not be certified."""


class CausalModel(Protocol):
    """A model that runs a sparse prefill."""

    def forward(self, slots: Any, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Run `tokens` at `positions`, write their rows, and return the logits of the last one.

        Each token attends to all rows at or before its own position. The caller guarantees that
        every row before the largest position was written, or is among `positions`.
        """
