"""The `Tier` contract: key -> frame, bounded in size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvboost.codecs.frame import Head
from kvboost.core import FrameKey, Owner
from kvboost.errors import TierUnavailable
from kvboost.tiers.epochs import check_epoch, read_epoch, write_epoch


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

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        """Leave no bytes of these keys here, nor of any frame of these owners.

        What cannot be listed here stays until it is evicted: nobody has a key to it any more.
        """
        self.discard(keys)

    def epoch(self, key: FrameKey) -> int:
        """The epoch of a tenant that is kept here, 0 if there is none."""
        found = self.get([key]).get(key)
        if found is None:
            return 0
        check_epoch(found, key)
        return read_epoch(found)

    def raise_epoch(self, key: FrameKey, epoch: int) -> int:
        """Keep the epoch of a tenant for good, unless a later one is here; the one before."""
        before = self.epoch(key)
        if before < epoch:
            self.discard([key])  # where a store keeps the first value of a key
            if self.put({key: write_epoch(key, epoch)}):
                raise TierUnavailable("there is no room for an epoch")
        return before

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

    def epochs(self) -> Mapping[FrameKey, int]:
        """The epochs of tenants that were kept here."""
        return {}
