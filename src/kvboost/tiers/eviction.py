"""Who leaves first. Knows keys and sizes; no bytes, no I/O, no locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from kvboost.core import FrameKey


class Eviction(ABC):
    """An order of the keys of one tier, kept up to date by the tier."""

    @abstractmethod
    def add(self, key: FrameKey, size_bytes: int) -> None:
        """A key came in."""

    @abstractmethod
    def use(self, key: FrameKey) -> None:
        """A key was read."""

    @abstractmethod
    def remove(self, key: FrameKey) -> None:
        """A key went out, for whatever reason."""

    @abstractmethod
    def victims(self) -> Iterator[FrameKey]:
        """All keys, the first to leave first. The tier must not change while this is read."""


class SegmentedLRU(Eviction):
    """Recency within two segments: what was used again outlives what was only stored.

    Keys start on probation; a use protects them. When the protected ones outgrow their share of
    the budget, the least recently used of them go back on probation.
    """

    PROTECTED_RATIO = 0.8  # the usual split of segmented LRU; not tuned

    def __init__(self, budget_bytes: int) -> None:
        self._protected_budget = int(budget_bytes * self.PROTECTED_RATIO)
        self._probation: OrderedDict[FrameKey, int] = OrderedDict()
        self._protected: OrderedDict[FrameKey, int] = OrderedDict()
        self._protected_bytes = 0

    def add(self, key: FrameKey, size_bytes: int) -> None:
        """Start on probation."""
        self._probation[key] = size_bytes

    def use(self, key: FrameKey) -> None:
        """Become the most recent protected key."""
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        size_bytes = self._probation.pop(key)
        self._protected[key] = size_bytes
        self._protected_bytes += size_bytes
        while self._protected_bytes > self._protected_budget:
            oldest, size_bytes = self._protected.popitem(last=False)
            self._protected_bytes -= size_bytes
            self._probation[oldest] = size_bytes

    def remove(self, key: FrameKey) -> None:
        """Forget a key."""
        if key in self._protected:
            self._protected_bytes -= self._protected.pop(key)
        else:
            del self._probation[key]

    def victims(self) -> Iterator[FrameKey]:
        """Probation by age, then the protected ones by age."""
        yield from self._probation
        yield from self._protected
