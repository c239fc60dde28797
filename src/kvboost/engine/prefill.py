"""The flow: the seven stages in their order, a line each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost.build import Parts
from kvboost.core import Chunk, ChunkKeys, ReuseMode, ReusePlan
from kvboost.models.slots import SlotCache
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import find
from kvboost.reuse.place import assemble
from kvboost.reuse.run import forward
from kvboost.reuse.store import commit

if TYPE_CHECKING:
    import torch

FIRST_NEW_ROWS = 1024  # room for the answer to start with; buffers grow when it is longer


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
    """Fill the K/V of `tokens`, computing only what the store cannot supply.

    `capacity` is what the sequence may grow to.
    """
    started = time.perf_counter()
    is_alone = parts.model.is_alone(capacity)
    found = ReusePlan(len(tokens))
    if reuse != "off" and not is_alone:
        chunks, keys = _named_chunks(tokens, parts, tenant)
        found = find(chunks, keys, parts.index, granularity=parts.piece_tokens or 1)
    looked_up = time.perf_counter()
    slots = parts.model.slots(len(tokens) + min(capacity - len(tokens), FIRST_NEW_ROWS))
    plan = assemble(found, slots, parts.tier, parts.codec, parts.metrics)
    for lost in found.matches[len(plan.matches) :][:1]:
        parts.index.remove(lost.key)  # so that it is stored again
    loaded = time.perf_counter()
    live = parts.repair.select(plan)
    pending = forward(parts.model, slots, tokens, live, None if is_alone else parts.piece_tokens)
    return Prefilled(slots, plan, pending, 1e3 * (looked_up - started), 1e3 * (loaded - looked_up))


def complete(prefilled: Prefilled, tokens: Sequence[int], parts: Parts) -> torch.Tensor:
    """Compute what is pending; the logits after the last token [1, vocabulary]."""
    rest = [tokens[position] for position in prefilled.pending]
    return parts.model.forward(prefilled.slots, rest, prefilled.pending)


def keep(slots: SlotCache, tokens: Sequence[int], parts: Parts, *, tenant: str) -> None:
    """Store the K/V of `tokens`, which `slots` holds from its first row on."""
    chunks, keys = _named_chunks(tokens, parts, tenant)
    commit(slots, chunks, keys, parts.index, parts.tier, parts.codec, parts.metrics)


def warm_up(tokens: list[int], parts: Parts, *, tenant: str) -> int:
    """Compute and store what the store lacks of `tokens`; return how many were computed."""
    if parts.model.refusal or parts.model.is_alone(len(tokens)):
        return 0
    prefilled = prefill(tokens, parts, reuse="exact", tenant=tenant, capacity=len(tokens))
    complete(prefilled, tokens, parts)
    size = parts.piece_tokens or 1
    whole = tokens[: len(tokens) // size * size]
    if whole:
        keep(prefilled.slots, whole, parts, tenant=tenant)
    parts.model.recycle(prefilled.slots)
    return len(tokens) - prefilled.plan.num_reused


def pin(tokens: list[int], parts: Parts, *, tenant: str, ttl_s: float | None) -> int:
    """Keep the stored chunks of `tokens` from leaving; return how many they are."""
    chunks, keys = _named_chunks(tokens, parts, tenant)
    matches = find(chunks, keys, parts.index).matches
    return parts.tier.pin([match.key for match in matches], ttl_s)


def _named_chunks(
    tokens: Sequence[int], parts: Parts, tenant: str
) -> tuple[list[Chunk], list[ChunkKeys]]:
    options = parts.options
    chunks = split(tokens, options.chunk_size, options.chunk_boundary_window, parts.boundaries)
    return chunks, derive(chunks, namespace(parts.model.fingerprint, tenant, parts.piece_tokens))
