"""Stored chunks in host memory, as frames."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost.codecs.frame import Head, allocate, check_codec, decode, read, write
from kvboost.core import Anchor, Entry, Span

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
    def sensitivity(self) -> bytes:
        """A byte for each token, or empty."""
        return self.head.sensitivity

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """The places by which it is found."""
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
        self, entry: Entry, slots: Slots, span: Span, sensitivity: bytes, anchors: Iterable[Anchor]
    ) -> FrameChunk:
        """A chunk of rows; these may be overwritten afterwards."""
        frame = write(entry, slots.read(span), self._codec, sensitivity, anchors)
        return FrameChunk(frame, read(frame), self._codec)

    def from_frame(self, frame: memoryview) -> FrameChunk:
        """A chunk of a copy of `frame`, which was checked."""
        head = read(frame)
        check_codec(head, self._codec)
        copy = allocate(frame.nbytes)
        copy[:] = frame
        return FrameChunk(copy, head, self._codec)
