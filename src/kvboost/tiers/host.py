"""Stored chunks as frames in host memory: memory's own, or a tier below a pool on a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost.codecs.frame import Head, allocate, check_codec, decode, owner_of, read, write
from kvboost.core import Anchor, Entry, FrameKey, Owner, Span
from kvboost.tiers.base import OwnTier, TierStats
from kvboost.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from kvboost.codecs.base import KV, Codec
    from kvboost.models.base import Slots


@dataclass(frozen=True, slots=True)
class FrameChunk:
    """A stored chunk as its frame (`kvboost.tiers.base.StoredChunk`)."""

    source: memoryview
    head: Head
    codec: Codec

    rows = None
    is_in_use = False

    @property
    def entry(self) -> Entry:
        """What it holds."""
        return self.head.entry

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """The anchors by which it is found at any position."""
        return self.head.anchors

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self.source.nbytes

    def kv(self) -> KV:
        """Its K/V."""
        return decode(self.source, self.head, self.codec)

    def frame(self) -> memoryview:
        """Its frame."""
        return self.source


class HostFrames:
    """Keeps chunks as frames (`kvboost.tiers.base.Medium`)."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def from_slots(
        self, entry: Entry, slots: Slots, span: Span, anchors: Iterable[Anchor]
    ) -> FrameChunk:
        """A chunk of rows; these may be overwritten afterwards."""
        frame = write(entry, slots.read(span), self._codec, anchors)
        return FrameChunk(frame, read(frame), self._codec)

    def from_frame(self, frame: memoryview) -> FrameChunk:
        """A chunk of a copy of `frame`, which was checked."""
        head = read(frame)
        check_codec(head, self._codec)
        copy = allocate(frame.nbytes)
        copy[:] = frame
        return FrameChunk(copy, head, self._codec)

    def loading(self) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()


class HostTier(OwnTier):
    """Frames within a budget of bytes; they end with the process."""

    def __init__(
        self, codec: Codec, budget_bytes: int, max_entries: int | None, quota_bytes: int
    ) -> None:
        """`quota_bytes` is what one tenant may hold of the budget."""
        self._memory, self._codec = MemoryTier(budget_bytes, max_entries, quota_bytes), codec
        self._epochs: dict[FrameKey, int] = {}
        self._owners: dict[FrameKey, Owner] = {}

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """The frames themselves."""
        return {key: chunk.frame() for key, chunk in self._memory.get(keys).items()}

    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Keep frames, which nobody writes any more."""
        chunks = {key: FrameChunk(each, read(each), self._codec) for key, each in frames.items()}
        self._owners |= {key: owner_of(each) for key, each in frames.items()}
        left = self._memory.put(chunks)
        self._forget(left)
        return left

    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Forget frames."""
        gone = list(keys)
        self._memory.discard(gone)
        self._forget(gone)

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        """Forget frames, and all of these owners."""
        theirs = [key for key, owner in list(self._owners.items()) if owner in owners]
        self.discard([*keys, *theirs])

    def epoch(self, key: FrameKey) -> int:
        """The epoch of a tenant."""
        return self._epochs.get(key, 0)

    def raise_epoch(self, key: FrameKey, epoch: int) -> int:
        """Remember a later epoch of a tenant."""
        before = self.epoch(key)
        self._epochs[key] = max(before, epoch)
        return before

    def holds(self, key: FrameKey) -> bool:
        """Whether it is here."""
        return self._memory.holds(key)

    def stats(self) -> TierStats:
        """Sizes now."""
        return self._memory.stats()

    def _forget(self, keys: Iterable[FrameKey]) -> None:
        for key in keys:
            self._owners.pop(key, None)
