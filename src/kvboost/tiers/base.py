"""The `Tier` contract: key -> frame, bounded in size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvboost.codecs.frame import Head
from kvboost.core import FrameKey


@dataclass(frozen=True, slots=True)
class TierStats:
    """The size of a tier at one moment, as far as it is known here."""

    num_entries: int
    size_bytes: int
    budget_bytes: int


class Tier(ABC):
    """A bounded map from key to bytes. Safe to call from several threads.

    `bytes_read` grows while a read is under way, as far as a tier can tell: a slow tier is not a
    dead one.

    `get`, `put` and `discard` may raise `TierUnavailable` at any time, which callers treat as a
    miss. Bytes are opaque here: whoever reads them from outside of this process checks them.
    """

    bytes_read = 0

    @abstractmethod
    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """What is stored under those of `keys` that are here; not to be written."""

    @abstractmethod
    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Keep frames, and return the keys that left to make room, as far as that is known.

        A frame that found no room is among them. When it returns, what was kept is there for
        everybody who shares the tier, and outlives this process if the tier does.
        """

    @abstractmethod
    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Forget keys."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Sizes now; does not raise and does not wait."""

    def close(self) -> None:
        """Let go of files and connections."""
        return


class OwnTier(Tier):
    """A tier that only this process writes, and that knows what it holds."""

    @abstractmethod
    def holds(self, key: FrameKey) -> bool:
        """Whether `key` is here, without reading it."""

    def heads(self) -> Iterable[Head]:
        """What the frames that are here say of themselves; damaged ones are left out."""
        return ()
