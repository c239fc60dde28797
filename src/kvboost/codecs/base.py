"""The `Codec` contract: K/V of one chunk -> bytes -> K/V of one chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    KV: TypeAlias = Sequence[torch.Tensor]
    """One tensor [planes, heads, tokens, head_dim] for each plane group of the geometry."""


class Codec(ABC):
    """Turns a chunk's K/V into bytes and back. Stateless but for the model's geometry."""

    @abstractmethod
    def encode(self, kv: KV, sensitivity: bytes = b"") -> memoryview:
        """Copy `kv` into bytes of its own; the caller may overwrite `kv` afterwards.

        `sensitivity` is a byte for each token: how much its K/V depends on its context.
        """

    @abstractmethod
    def decode(self, frame: memoryview, num_tokens: int) -> KV:
        """The K/V of `num_tokens` tokens, possibly as views of `frame`: read, never written.

        Raises:
            CacheError: the bytes cannot be the K/V of that many tokens.
        """

    @abstractmethod
    def sensitivity(self, frame: memoryview, num_tokens: int) -> bytes:
        """What `encode` was given as sensitivity."""
