"""Index, tier and codec together: what the stages that load and store K/V work on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvboost.codecs.base import Codec
from kvboost.core import FrameKey
from kvboost.errors import CacheError
from kvboost.metrics import Metrics
from kvboost.tiers.base import Tier
from kvboost.tiers.index import ChunkIndex

NUM_REMEMBERED = 4096  # evicted keys, for explanations

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkStore:
    """Names and words of chunks in the index, their bytes in the tier."""

    index: ChunkIndex
    tier: Tier
    codec: Codec
    metrics: Metrics
    _evicted: OrderedDict[FrameKey, None] = field(default_factory=OrderedDict)

    def note_evicted(self, keys: Iterable[FrameKey]) -> None:
        """Drop chunks that left the tier to make room, and remember the latest of them."""
        for key in keys:
            self.index.remove(key)
            self._evicted[key] = None
        while len(self._evicted) > NUM_REMEMBERED:
            self._evicted.popitem(last=False)

    def was_evicted(self, key: FrameKey) -> bool:
        """Whether a chunk is known to have been here and to have left for want of room."""
        return key in self._evicted and self.index.get(key) is None

    def forget(self, keys: Iterable[FrameKey]) -> None:
        """Drop chunks whose bytes are gone from the index, so that they are stored again."""
        for key in keys:
            self.index.remove(key)

    def note_fault(self, error: CacheError) -> None:
        """Count and log a cache fault; the request goes on without the cache."""
        log.warning("cache fault, going on without: %s", error)
        self.metrics.add("cache_faults")
