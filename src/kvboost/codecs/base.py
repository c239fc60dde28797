"""The `Codec` contract: K/V of one chunk -> bytes -> K/V of one chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from kvboost.core import KVGeometry

if TYPE_CHECKING:
    import torch

    KV: TypeAlias = Sequence[torch.Tensor]
    """One tensor [planes, heads, tokens, head_dim] for each plane group of the geometry."""


CODEC_NAMES = {0: "raw", 1: "int8", 2: "int4"}
"""By the number in the frame; a number is never given to another format."""


class Codec(ABC):
    """Turns a chunk's K/V into the payload of a frame and back."""

    number: ClassVar[int]

    @property
    def name(self) -> str:
        """As in `CODEC_NAMES`."""
        return CODEC_NAMES[self.number]

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def size(self, num_tokens: int) -> int:
        """Bytes of the payload of that many tokens."""

    @abstractmethod
    def encode(self, kv: KV, payload: memoryview) -> None:
        """Fill `payload`, of the right size; the caller may overwrite `kv` afterwards."""

    @abstractmethod
    def decode(self, payload: memoryview, num_tokens: int) -> KV:
        """The K/V, possibly as views of a `payload` of the right size: read, never written."""
