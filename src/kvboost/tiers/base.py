"""The contracts of tiers: memory keeps chunks, the tiers below it frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvboost.codecs.frame import Head
from kvboost.core import Anchor, Entry, FrameKey, Owner, Span
from kvboost.errors import TierUnavailable
from kvboost.tiers.notes import check_epoch, read_epoch, write_epoch

if TYPE_CHECKING:
    from kvboost.codecs.base import KV
    from kvboost.models.base import Slots


@dataclass(frozen=True, slots=True)
class TierStats:
    """The current size of a tier, as far as this process knows it."""

    num_entries: int
    size_bytes: int
    budget_bytes: int


class StoredChunk(Protocol):
    """A chunk in memory; freed as soon as nobody refers to it."""

    @property
    def entry(self) -> Entry:
        """What it holds."""

    @property
    def anchors(self) -> Iterable[Anchor]:
        """The anchors by which it is found at any position."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""

    @property
    def rows(self) -> Sequence[tuple[int, int]] | None:
        """Its rows in the KV pool, if it is there."""

    @property
    def is_in_use(self) -> bool:
        """Whether evicting it would free nothing now."""

    def kv(self) -> KV:
        """Its K/V, possibly as views."""

    def frame(self) -> memoryview:
        """Its frame, for another tier."""


class Medium(Protocol):
    """How memory keeps chunks: as frames, or in the KV pool."""

    def from_slots(
        self, entry: Entry, slots: Slots, span: Span, anchors: Iterable[Anchor]
    ) -> StoredChunk:
        """A chunk of the rows of `span`.

        Raises:
            KVBoostError: no room.
        """

    def from_frame(self, frame: memoryview) -> StoredChunk:
        """A chunk of a copy of a frame, which was checked.

        Raises:
            CacheError: not a frame of this engine.
            KVBoostError: no room.
        """

    def loading(self) -> AbstractContextManager[None]:
        """A block at whose end chunks are complete that `from_frame` made inside it."""


class Tier(ABC):
    """A bounded map from keys to frames. Thread-safe.

    `bytes_read` grows during a read if the tier can measure it: a slow tier is not a dead one.

    `get`, `put` and `discard` may raise `TierUnavailable` at any time, which callers count as a
    miss. A tier does not interpret frames: the reader verifies their checksums.
    """

    bytes_read = 0

    @abstractmethod
    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """The frames of those `keys` that the tier holds; callers must not write to them."""

    @abstractmethod
    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Store frames, and return the keys that were evicted, as far as known.

        A frame that does not fit counts as evicted. On return, the stored frames are visible to all
        processes that share the tier, and survive this process if the tier does.
        """

    @abstractmethod
    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Remove frames."""

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        """Remove all bytes of these keys, and of all frames of these owners.

        Frames that the tier cannot list remain until they are evicted; no key leads to them.
        """
        self.discard(keys)

    def epoch(self, key: FrameKey) -> int:
        """The stored epoch of a tenant; 0 if there is none."""
        found = self.get([key]).get(key)
        if found is None:
            return 0
        check_epoch(found, key)
        return read_epoch(found)

    def raise_epoch(self, key: FrameKey, epoch: int) -> int:
        """Store a tenant's epoch unless a later one is stored; returns the previous one."""
        before = self.epoch(key)
        if before < epoch:
            self.discard([key])  # where a store keeps the first value of a key
            if self.put({key: write_epoch(key, epoch)}):
                raise TierUnavailable("no space for an epoch")
        return before

    @abstractmethod
    def stats(self) -> TierStats:
        """Current sizes; never raises or blocks."""

    def close(self) -> None:
        """Close files and connections."""
        return


class OwnTier(Tier):
    """A tier that only this process writes to, so that it knows its contents."""

    @abstractmethod
    def holds(self, key: FrameKey) -> bool:
        """Whether the tier holds `key`, without reading the frame."""

    def heads(self) -> Iterable[Head]:
        """The heads of all stored frames, except damaged ones."""
        return ()

    def epochs(self) -> Mapping[FrameKey, int]:
        """The stored epochs of tenants."""
        return {}
