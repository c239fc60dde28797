"""Options -> concrete parts; the only file that names implementations."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from kvboost.codecs.base import Codec
from kvboost.codecs.kivi import Int4Codec, Int8Codec
from kvboost.codecs.raw import RawCodec
from kvboost.config import Options
from kvboost.core import KVGeometry
from kvboost.errors import ConfigError
from kvboost.metrics import Metrics
from kvboost.models.adapters import Adapter
from kvboost.models.hf import HFModel
from kvboost.models.paged import BlockPool
from kvboost.models.pool import Pool, SlotPool
from kvboost.policy.cost import CostModel
from kvboost.policy.guard import QualityGuard
from kvboost.reuse.repair.base import Repair
from kvboost.reuse.repair.none import NoRepair
from kvboost.reuse.repair.sampled import SampledRepair
from kvboost.reuse.repair.scored import ScoredRepair
from kvboost.reuse.repair.selective import SelectiveRepair
from kvboost.tiers.index import ChunkIndex
from kvboost.tiers.memory import MemoryTier
from kvboost.tiers.stack import TierStack
from kvboost.tiers.store import ChunkStore
from kvboost.tiers.urls import openers

LEAST_WORKING_BYTES = 1 << 30

CODECS: Mapping[int, type[Codec]] = {16: RawCodec, 8: Int8Codec, 4: Int4Codec}


@dataclass(frozen=True)
class Parts:
    """What a request needs; shared by all requests of an engine."""

    options: Options
    model: HFModel
    boundaries: Set[int]  # token ids after which a chunk may end early
    pool: Pool  # working K/V of the batch
    store: ChunkStore
    repairs: Mapping[float, Repair]  # by ratio: none, the one asked for, then stronger ones
    cost: CostModel
    guard: QualityGuard
    metrics: Metrics

    def under(self, adapter: Adapter) -> Parts:
        """The same for requests under an adapter: forwards and keys come from one object."""
        if adapter is self.model.adapter:
            return self
        return replace(self, model=self.model.under(adapter))

    def workload(self, tenant: str) -> str:
        """Whose answers are judged together."""
        name = self.model.adapter.name
        return f"{tenant} under {name}" if name else tenant

    @property
    def variants(self) -> list[Parts]:
        """Those of all adapters and of none, once for each key space: names do not count."""
        each = map(self.under, self.model.adapters.all)
        return list({parts.model.fingerprint: parts for parts in each}.values())

    @property
    def piece_tokens(self) -> int | None:
        """Piece size of prefill; None: in one piece."""
        return self.options.piece_tokens if self.options.deterministic else None

    @property
    def working_tokens(self) -> int:
        """The most tokens of K/V that all running requests may hold together."""
        return self.pool.num_tokens


def build(options: Options, model: HFModel, boundaries: Set[int]) -> Parts:
    """Put an engine's parts together."""
    metrics = Metrics()
    repairs = build_repairs(options)
    return Parts(
        options=options,
        model=model,
        boundaries=boundaries,
        pool=build_pool(options, model),
        store=build_store(options, model.geometry, metrics),
        repairs={0.0: NoRepair(), **repairs},
        cost=CostModel(),
        guard=QualityGuard(options.quality_budget, tuple(repairs), options.audit_ratio),
        metrics=metrics,
    )


def build_store(
    options: Options, geometry: KVGeometry, metrics: Metrics, index: ChunkIndex | None = None
) -> ChunkStore:
    """Memory and the tiers below it; waits until these are open, or failed to open for now.

    Raises:
        ConfigError: a tier can never be opened.
    """
    quota_bytes = int(options.tenant_quota * options.max_cache_bytes)
    memory = MemoryTier(options.max_cache_bytes, options.max_chunks, quota_bytes)
    deadline_s = options.tier_deadline_ms / 1e3
    tiers = TierStack(memory, metrics, deadline_s)
    codec = CODECS[options.kv_cache_bits](geometry)
    store = ChunkStore(ChunkIndex() if index is None else index, tiers, codec, metrics)
    try:
        for opener in openers(options.tier_urls, options.max_disk_bytes, 2 * deadline_s):
            tiers.add_below(opener, store.adopt)
    except ConfigError:
        tiers.close()
        raise
    return store


def build_pool(options: Options, model: HFModel) -> Pool:
    """The working memory of the batch.

    "auto" is blocks on CPUs, where they were measured (docs/adr/0023-paged-pool.md).
    """
    geometry, device, size = model.geometry, model.model.device, options.block_size
    num_blocks = options.num_blocks
    if num_blocks is None:
        budget_bytes = max(options.max_cache_bytes, LEAST_WORKING_BYTES)
        num_blocks = budget_bytes // (size * max(1, geometry.bytes_per_token))
    if options.backend == "paged" or (options.backend == "auto" and device.type == "cpu"):
        return BlockPool(geometry, 0 if model.refusal else num_blocks, size, device)
    return SlotPool(geometry, num_blocks * size, device)


def build_repairs(options: Options) -> dict[float, Repair]:
    """The strategy that the options name by the ratio asked for, and by those it is raised to."""
    return {ratio: build_repair(options, ratio) for ratio in _ratios(options)}


def build_repair(options: Options, ratio: float) -> Repair:
    """The strategy that the options name."""
    match options.recompute_strategy:
        case "sampled":
            return SampledRepair(ratio, options.recompute_overlap)
        case "cacheblend":
            return ScoredRepair(ratio, lambda evidence: evidence.deviation())
        case "query":
            return ScoredRepair(ratio, lambda evidence: evidence.attention())
        case "sensitivity":
            return ScoredRepair(ratio, lambda evidence: evidence.sensitivity())
        case "selective":
            return SelectiveRepair(options.recompute_overlap, options.recompute_tail)
        case _:
            return NoRepair()


def _ratios(options: Options) -> list[float]:
    """The ratio asked for and, where it can be raised, its doubles up to 0.6."""
    first = options.recompute_ratio
    if options.recompute_strategy in ("none", "selective") or first == 0:
        return [first]
    return [first, *(ratio for ratio in (2 * first, 4 * first) if ratio <= 0.6)]
