"""Options -> concrete parts; the only file that names implementations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvboost.codecs.base import Codec
from kvboost.codecs.frame import MAX_HEAD_BYTES
from kvboost.codecs.kivi import Int4Codec, Int8Codec
from kvboost.codecs.raw import RawCodec
from kvboost.config import EXACT_BITS, Options
from kvboost.core import KVGeometry
from kvboost.errors import ConfigError
from kvboost.metrics import Metrics
from kvboost.models.adapters import Adapter
from kvboost.models.hf import HFModel
from kvboost.models.pool import BlockPool, devices_of
from kvboost.models.pooled import PooledChunks
from kvboost.policy.cost import CostModel
from kvboost.policy.guard import QualityGuard
from kvboost.reuse.repair import (
    CacheBlendRepair,
    NoRepair,
    QueryRepair,
    Repair,
    SampledRepair,
    SelectiveRepair,
)
from kvboost.tiers.base import Medium
from kvboost.tiers.host import HostFrames, HostTier
from kvboost.tiers.index import ChunkIndex
from kvboost.tiers.memory import MemoryTier
from kvboost.tiers.stack import Opener, TierStack
from kvboost.tiers.store import ChunkStore
from kvboost.tiers.urls import openers

LEAST_WORKING_BYTES = 1 << 30
DEVICE_SHARE = 0.7  # of a GPU's free memory after the model is loaded; the rest is for steps

CODECS: Mapping[int, type[Codec]] = {16: RawCodec, 8: Int8Codec, 4: Int4Codec}


@dataclass(frozen=True)
class Parts:
    """What a request needs; shared by all requests of an engine."""

    options: Options
    model: HFModel
    boundaries: Set[int]  # token ids after which a chunk may end early
    pool: BlockPool  # K/V of running requests, and of stored chunks in memory
    store: ChunkStore
    repairs: Mapping[float, Repair]  # by ratio: none, the one asked for, then stronger ones
    cost: CostModel
    guard: QualityGuard
    metrics: Metrics

    def under(self, adapter: Adapter) -> Parts:
        """The same parts with the model under an adapter, which sets its forwards and its keys."""
        if adapter is self.model.adapter:
            return self
        return replace(self, model=self.model.under(adapter))

    def workload(self, tenant: str) -> str:
        """What the guardrail judges as one: the outputs of a tenant under one adapter."""
        name = self.model.adapter.name
        return f"{tenant} under {name}" if name else tenant

    @property
    def variants(self) -> list[Parts]:
        """These parts under each adapter and under none; adapters with equal weights count once."""
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
    pool = build_pool(options, model)
    return Parts(
        options=options,
        model=model,
        boundaries=boundaries,
        pool=pool,
        store=build_store(options, model.geometry, metrics, pool=pool),
        repairs={0.0: NoRepair(), **repairs},
        cost=CostModel(),
        guard=QualityGuard(
            options.quality_budget, tuple(repairs), options.audit_ratio, options.changed_budget
        ),
        metrics=metrics,
    )


def build_store(
    options: Options,
    geometry: KVGeometry,
    metrics: Metrics,
    index: ChunkIndex | None = None,
    pool: BlockPool | None = None,
    keep: Callable[[Codec], Medium] = HostFrames,
) -> ChunkStore:
    """Memory and the tiers below it. Waits until those are open, or have failed to open for now.

    Unquantised chunks stay in `pool`. If that is on a device, all chunks do, and host memory is the
    first tier below it. Without a pool, memory keeps chunks as `keep` says.

    Raises:
        ConfigError: a tier can never be opened.
    """
    budget_bytes = options.max_cache_bytes
    codec = CODECS[options.kv_cache_bits](geometry)
    medium = keep(codec)
    host: list[Opener] = []
    is_below = pool is not None and pool.device.type != "cpu"
    if pool is not None and (is_below or options.kv_cache_bits == EXACT_BITS):
        medium = PooledChunks(pool, codec)
        pool_bytes = pool.num_blocks * pool.block_bytes
        if is_below:
            limits = options.max_chunks, int(options.tenant_quota * budget_bytes)
            host = [Opener("host", partial(HostTier, codec, budget_bytes, *limits))]
            budget_bytes = pool_bytes
        budget_bytes = min(budget_bytes, pool_bytes)
    quota_bytes = int(options.tenant_quota * budget_bytes)
    memory = MemoryTier(budget_bytes, options.max_chunks, quota_bytes)
    deadline_s = options.tier_deadline_ms / 1e3
    tiers = TierStack(memory, medium, metrics, deadline_s)
    if isinstance(medium, PooledChunks) and pool is not None:
        pool.evict = tiers.make_room
        pool.pinned = lambda: [run for chunk in memory.pinned() for run in chunk.rows or ()]
    store = ChunkStore(ChunkIndex() if index is None else index, tiers, codec, metrics)
    try:
        # Chunks end at the boundary that is nearest to their size.
        largest_bytes = codec.size(2 * options.chunk_size) + MAX_HEAD_BYTES
        disk_bytes, timeout_s = options.max_disk_bytes, 2 * deadline_s
        secret = options.cache_secret
        below = openers(options.tier_urls, disk_bytes, timeout_s, largest_bytes, secret)
        for opener in [*host, *below]:
            tiers.add_below(opener, store.adopt)
    except ConfigError:
        tiers.close()
        raise
    return store


def build_pool(options: Options, model: HFModel) -> BlockPool:
    """The memory of K/V."""
    geometry, device, size = model.geometry, model.model.device, options.block_size
    num_blocks = options.num_blocks
    if num_blocks is None:
        budget_bytes = max(options.max_cache_bytes, LEAST_WORKING_BYTES)
        num_blocks = -(-budget_bytes // (size * max(1, geometry.bytes_per_token)))
        if device.type == "cuda":
            num_blocks = _room_on_devices(geometry, device) // size
    return BlockPool(geometry, 0 if model.refusal else num_blocks, size, device)


def _room_on_devices(geometry: KVGeometry, home: torch.device) -> int:
    """Tokens whose K/V fits on every device that has a part of it."""
    sizes: Counter[torch.device] = Counter()
    for group, device in zip(geometry.groups, devices_of(geometry, home), strict=True):
        sizes[device] += replace(geometry, groups=(group,)).bytes_per_token
    rooms = (
        int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]) // num_bytes
        for device, num_bytes in sizes.items()
    )
    return min(rooms, default=0)


def build_repairs(options: Options) -> dict[float, Repair]:
    """The repair strategy at its own ratio, and at those that the guardrail may raise it to."""
    return {ratio: build_repair(options, ratio) for ratio in _ratios(options)}


def build_repair(options: Options, ratio: float) -> Repair:
    """The repair strategy of the options."""
    match options.recompute_strategy:
        case "sampled":
            return SampledRepair(ratio, options.recompute_overlap)
        case "cacheblend":
            return CacheBlendRepair(ratio)
        case "query":
            return QueryRepair(ratio, options.recompute_overlap)
        case "selective":
            return SelectiveRepair(options.recompute_overlap)
        case "none":
            return NoRepair()
    raise KeyError(options.recompute_strategy)


def _ratios(options: Options) -> list[float]:
    """The ratio asked for and, where it can be raised, its doubles up to 0.6."""
    first = options.recompute_ratio
    if options.recompute_strategy in ("none", "selective") or first == 0:
        return [first]
    return [first, *(ratio for ratio in (2 * first, 4 * first) if ratio <= 0.6)]
