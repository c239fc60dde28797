"""Options -> concrete parts; the only file that names implementations."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kvboost.codecs.base import Codec
from kvboost.codecs.raw import RawCodec
from kvboost.config import Options
from kvboost.metrics import Metrics
from kvboost.models.hf import HFModel
from kvboost.reuse.repair.base import Repair
from kvboost.reuse.repair.none import NoRepair
from kvboost.tiers.base import Tier
from kvboost.tiers.index import ChunkIndex
from kvboost.tiers.memory import MemoryTier


@dataclass(frozen=True)
class Parts:
    """What a request needs; shared by all requests of an engine."""

    options: Options
    model: HFModel
    boundaries: Set[int]  # token ids after which a chunk may end early
    index: ChunkIndex
    tier: Tier
    codec: Codec
    repair: Repair
    metrics: Metrics

    @property
    def piece_tokens(self) -> int | None:
        """Piece size of prefill; None: in one piece."""
        return self.options.piece_tokens if self.options.deterministic else None


def build(options: Options, model: HFModel, boundaries: Set[int]) -> Parts:
    """Put an engine's parts together."""
    return Parts(
        options=options,
        model=model,
        boundaries=boundaries,
        index=ChunkIndex(),
        tier=MemoryTier(options.max_cache_bytes, options.max_chunks),
        codec=RawCodec(model.geometry),
        repair=NoRepair(),
        metrics=Metrics(),
    )
