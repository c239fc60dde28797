"""The `Tier` contract: key -> bytes, bounded in size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from kvboost.core import FrameKey


@dataclass(frozen=True, slots=True)
class TierStats:
    """The size of a tier at one moment."""

    num_entries: int
    size_bytes: int
    budget_bytes: int
    num_pinned: int


class Tier(ABC):
    """A bounded map from key to bytes. Safe to call from several threads.

    `get`, `put` and `discard` may raise `TierUnavailable`, which callers treat as a miss; `pin`
    and `stats` do not raise.
    """

    @abstractmethod
    def get(self, key: FrameKey) -> memoryview | None:
        """The bytes last put under `key`, or None. Counts as a use; they are not to be written."""

    @abstractmethod
    def put(self, key: FrameKey, frame: memoryview) -> list[FrameKey]:
        """Keep `frame`, which the caller gives away, and return the keys that left to make room.

        The budget holds at every moment. Where it leaves no room, `key` itself is among the
        returned keys and nothing was kept.
        """

    @abstractmethod
    def discard(self, key: FrameKey) -> bool:
        """Forget `key` unless it is pinned; whether it is gone now."""

    @abstractmethod
    def pin(self, keys: Iterable[FrameKey], ttl_s: float | None) -> int:
        """Keep those of `keys` that are here from leaving, for `ttl_s` seconds or for good.

        Returns how many were pinned.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Sizes now."""
