"""The `Codec` contract: K/V of one chunk -> bytes -> K/V of one chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from kvboost.core import KVGeometry

if TYPE_CHECKING:
    import torch

    KV: TypeAlias = Sequence[torch.Tensor]
    """One tensor [planes, heads, tokens, head_dim] for each plane group of the geometry."""

    Send: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
    """Brings bytes of the plane group of that number to where they are decoded."""


ALIGNMENT = 64  # of sections of a frame: tensors are views of them

CODEC_NAMES = {0: "raw", 1: "int8", 2: "int4"}
"""By the number in the frame; a number is never given to another format."""


def stay(part: torch.Tensor, group: int) -> torch.Tensor:
    """Decode bytes where they are."""
    return part


class Codec(ABC):
    """Encodes a chunk's K/V as the payload of a frame, and decodes it."""

    number: ClassVar[int]

    @property
    def name(self) -> str:
        """Its name in `CODEC_NAMES`."""
        return CODEC_NAMES[self.number]

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def size(self, num_tokens: int) -> int:
        """Size of the payload for `num_tokens` tokens, in bytes."""

    @abstractmethod
    def encode(self, kv: KV, payload: memoryview) -> None:
        """Write `kv` to `payload`, which has the right size; keep no reference to `kv`."""

    @abstractmethod
    def decode(self, payload: memoryview, num_tokens: int, send: Send = stay) -> KV:
        """The K/V in `payload`, which has the right size; may be read-only views of it.

        It is decoded where `send` brings the bytes.
        """


def aligned(num_bytes: int) -> int:
    """Bytes up to the next section of a frame."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
