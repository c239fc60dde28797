"""The flow: the seven stages in their order, a line each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.build import Parts
from kvboost.core import Chunk, ChunkKeys, PrefixKey, ReuseMode, ReusePlan
from kvboost.models.slots import SlotCache
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import find
from kvboost.reuse.place import assemble
from kvboost.reuse.run import forward
from kvboost.reuse.store import commit


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose K/V is in `slots`, but for the positions `pending`."""

    slots: SlotCache
    plan: ReusePlan
    pending: Sequence[int]
    lookup_ms: float
    load_ms: float


def prefill(
    tokens: Sequence[int], parts: Parts, *, reuse: ReuseMode, tenant: str, capacity: int
) -> Prefilled:
    """Fill the K/V of `tokens`, computing only what the store cannot supply."""
    started = time.perf_counter()
    plan = ReusePlan(len(tokens))
    if reuse != "off":
        chunks, keys = _named_chunks(tokens, parts, tenant)
        plan = find(chunks, keys, parts.index, granularity=parts.piece_tokens or 1)
    found = time.perf_counter()
    slots = parts.model.slots(capacity)
    plan = assemble(plan, slots, parts.tier, parts.codec, parts.metrics)
    loaded = time.perf_counter()
    live = parts.repair.select(plan)
    pending = forward(parts.model, slots, tokens, live, parts.piece_tokens)
    return Prefilled(slots, plan, pending, 1e3 * (found - started), 1e3 * (loaded - found))


def keep(slots: SlotCache, tokens: Sequence[int], parts: Parts, *, tenant: str) -> None:
    """Store the K/V of `tokens`, which `slots` holds from its first row on."""
    chunks, keys = _named_chunks(tokens, parts, tenant)
    commit(slots, chunks, keys, parts.index, parts.tier, parts.codec, parts.metrics)


def warm_up(tokens: list[int], parts: Parts, *, tenant: str) -> int:
    """Compute and store what the store lacks of `tokens`; return how many were computed."""
    if parts.model.refusal:
        return 0
    prefilled = prefill(tokens, parts, reuse="exact", tenant=tenant, capacity=len(tokens))
    rest = [tokens[position] for position in prefilled.pending]
    parts.model.forward(prefilled.slots, rest, prefilled.pending)
    size = parts.piece_tokens or 1
    whole = tokens[: len(tokens) // size * size]
    if whole:
        keep(prefilled.slots, whole, parts, tenant=tenant)
    parts.model.recycle(prefilled.slots)
    return len(tokens) - prefilled.plan.num_reused


def keys_of(tokens: Sequence[int], parts: Parts, tenant: str) -> list[PrefixKey]:
    """The keys under which the chunks of `tokens` are stored, if they are."""
    return [key.prefix for key in _named_chunks(tokens, parts, tenant)[1]]


def _named_chunks(
    tokens: Sequence[int], parts: Parts, tenant: str
) -> tuple[list[Chunk], list[ChunkKeys]]:
    options = parts.options
    chunks = split(tokens, options.chunk_size, options.chunk_boundary_window, parts.boundaries)
    return chunks, derive(chunks, namespace(parts.model.fingerprint, tenant, parts.piece_tokens))
