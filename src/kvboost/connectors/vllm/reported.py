"""The workers' index: it lists its changes, for the copy on the scheduler's side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvboost.connectors.vllm.messages import Change
from kvboost.core import Anchor, Entry, FrameKey
from kvboost.tiers.index import ChunkIndex


class ReportedIndex(ChunkIndex):
    """An index that lists its changes for a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: deque[Change] = deque()

    def add(self, entry: Entry, anchors_in_it: Iterable[Anchor] = ()) -> None:
        """Make an entry findable."""
        words = tuple(anchors_in_it)
        super().add(entry, words)
        self._changes.append(Change(entry.key, entry, words))

    def remove(self, key: FrameKey) -> None:
        """Forget an entry."""
        super().remove(key)
        self._changes.append(Change(key))

    def take_changes(self) -> list[Change]:
        """The changes since the last call."""
        return [self._changes.popleft() for _ in range(len(self._changes))]
