"""Prefill with reuse: the seven stages in their order, a line each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvboost.build import Parts
from kvboost.codecs.frame import OWNER_BYTES
from kvboost.core import (
    Chunk,
    ChunkKeys,
    ContentKey,
    FrameKey,
    Match,
    MatchKind,
    Namespace,
    Owner,
    ReuseMode,
    ReusePlan,
    Span,
)
from kvboost.errors import KVBoostError
from kvboost.models.packed import LEAST_SHARED
from kvboost.models.pool import Run, cut
from kvboost.models.probe import Probe
from kvboost.models.rows import Rows
from kvboost.policy.cost import MOVED_GAIN, Work
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import content_key, derive, namespace
from kvboost.reuse.lookup import LEAST_MOVED_TOKENS, find, find_moved
from kvboost.reuse.place import assemble, is_what_it_says
from kvboost.reuse.run import forward
from kvboost.reuse.store import commit, commit_approximate
from kvboost.tiers.base import StoredChunk
from kvboost.tiers.memory import MemoryTier

if TYPE_CHECKING:
    import torch

Chunks: TypeAlias = dict[FrameKey, StoredChunk]


class Prefetched:
    """Chunks that are held in memory for a request until its rows are filled."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self.held: list[FrameKey] = []

    def release(self) -> None:
        """Allow their eviction again; happens by itself when a request is dropped."""
        held, self.held = self.held, []
        for key in held:
            self._memory.release(key)

    __del__ = release


@dataclass(frozen=True)
class Terms:
    """What a request may reuse, and whose."""

    reuse: ReuseMode
    tenant: str = ""
    ratio: float = 0.0  # of moved tokens that are repaired; one of `parts.repairs`


@dataclass(frozen=True)
class Decision:
    """What of a prompt will be reused."""

    plan: ReusePlan
    dropped: tuple[Span, ...]  # found, but computing it is expected to be faster
    is_alone: bool  # rotates its keys unlike shorter sequences
    capacity: int  # most tokens of the sequence
    started_at: float
    lookup_ms: float
    num_shared: int = 0  # tokens at the start in rows shared with another request

    def on_shared(self, chunks: Sequence[Chunk], keys: Sequence[ChunkKeys], num: int) -> Decision:
        """The same with the first `num` tokens taken from rows that another request has."""
        shared = [
            Match(Span(c.span.start, min(c.span.stop, num)), k.prefix, len(c.span), MatchKind.EXACT)
            for c, k in zip(chunks, keys, strict=True)
            if c.span.start < num
        ]
        plan = ReusePlan(self.plan.num_tokens, (*shared, *self.plan.after(num).matches))
        return replace(self, plan=plan, num_shared=num)


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose K/V is in its rows, but for the positions `pending`."""

    rows: Rows
    space: Namespace  # at its start
    num_deletions: int  # of the tenant's texts until its start
    plan: ReusePlan
    pending: Sequence[int]
    repaired: Sequence[int]
    corrected: Sequence[Span]  # moved text, whose rows between the pending ones are corrected
    dropped: tuple[Span, ...]
    work: Work
    started_at: float
    lookup_ms: float
    load_ms: float

    @property
    def num_cached(self) -> int:
        """Tokens that are not computed."""
        return self.plan.num_reused - len(self.repaired)


def prefill(
    tokens: Sequence[int],
    parts: Parts,
    terms: Terms,
    *,
    capacity: int,
    prefetched: Prefetched | None = None,
) -> Prefilled:
    """Fill the K/V of `tokens`, computing only what the store cannot supply.

    `capacity` is what the sequence may grow to, `prefetched` what `prefetch` returned.
    """
    decision = decide(tokens, parts, terms, capacity=capacity)
    return fill(decision, tokens, parts, terms, capacity, prefetched)


def room_for(num_rows: int, capacity: int, parts: Parts, prefix: Sequence[Run] = ()) -> Rows:
    """Rows of the pool, after a prefix that is there.

    Private rows for all of `capacity` if the pool has too little room; those cannot grow.
    """
    try:
        return Rows(parts.pool, num_rows, prefix)
    except KVBoostError:
        return parts.model.fresh_rows(capacity)


def _room_beside(
    chunks: Chunks, num_rows: int, capacity: int, parts: Parts, prefix: Sequence[Run]
) -> Rows:
    """Room for rows; the chunks to copy are evicted for it only if nothing else is left."""
    blocks = parts.pool.blocks_of([run for chunk in chunks.values() for run in chunk.rows or ()])
    parts.pool.hold(blocks)
    try:
        return Rows(parts.pool, num_rows, prefix)
    except KVBoostError:
        pass
    finally:
        parts.pool.release(blocks)
    return room_for(num_rows, capacity, parts, prefix)


def decide(tokens: Sequence[int], parts: Parts, terms: Terms, *, capacity: int) -> Decision:
    """Choose which stored K/V to reuse."""
    started = time.perf_counter()
    is_alone = parts.model.is_alone(capacity)
    found = ReusePlan(len(tokens)) if is_alone else look_up(tokens, parts, terms)
    wanted = worthwhile(found, parts, terms)
    lookup_ms = 1e3 * (time.perf_counter() - started)
    return Decision(wanted, dropped(found, wanted), is_alone, capacity, started, lookup_ms)


def fill(
    decision: Decision,
    tokens: Sequence[int],
    parts: Parts,
    terms: Terms,
    num_rows: int,
    prefetched: Prefetched | None = None,
    live: Sequence[Run] = (),
) -> Prefilled:
    """Place what is reused, choose what of it to repair, and compute all but the last piece.

    There is room for `num_rows` afterwards. An exact prefix in the pool is shared, the rest is
    copied. `live` are rows of another request, for the first `num_shared` tokens of the decision.
    With `prefetched`, which is released, no tier below memory is waited for here.
    """
    started = time.perf_counter()
    model, reused, store = parts.model, decision.plan, parts.store
    space, num_deletions = space_of(terms.tenant, parts), store.num_deletions[terms.tenant]
    keys = list(dict.fromkeys(m.key for m in reused.after(decision.num_shared).matches))
    chunks = store.tiers.get(keys) if prefetched is None else store.tiers.memory.get(keys)
    if prefetched is not None:
        prefetched.release()
    prefix = live or (
        [] if decision.is_alone else _stored_prefix(tokens, reused, chunks, space, parts)
    )
    rows = _room_beside(chunks, num_rows, decision.capacity, parts, prefix)
    copied = tuple(m for m in reused.matches if m.span.stop > rows.num_shared)
    placed = assemble(ReusePlan(len(tokens), copied), tokens, rows, model, store, space, chunks)
    del chunks
    store.forget(placed.lost)
    load_ms = 1e3 * (time.perf_counter() - started)
    shared = (m for m in reused.matches if m.span.stop <= rows.num_shared)
    plan = ReusePlan(len(tokens), (*shared, *placed.plan.matches))
    repair = parts.repairs[terms.ratio]
    repaired = repair.select(plan, Probe(model, rows, tokens, plan))
    pieces = None if decision.is_alone else parts.piece_tokens
    pending = forward(model, rows, tokens, plan.live, repaired, pieces)
    num_computed = len(tokens) - plan.num_reused + len(repaired)
    return Prefilled(
        rows=rows,
        space=space,
        num_deletions=num_deletions,
        plan=plan,
        pending=pending,
        repaired=repaired,
        corrected=repair.corrected(plan),
        dropped=decision.dropped,
        work=Work.of(len(tokens), num_computed, plan.num_reused),
        started_at=decision.started_at,
        lookup_ms=decision.lookup_ms,
        load_ms=load_ms,
    )


def _stored_prefix(
    tokens: Sequence[int], plan: ReusePlan, chunks: Chunks, space: Namespace, parts: Parts
) -> list[Run]:
    """Rows of the pool that hold the exact prefix, if it can be attended to where it is."""
    if not parts.model.joins or parts.piece_tokens is not None:
        return []
    rows: list[Run] = []
    num_rows = 0
    for match in plan.matches:
        chunk = chunks.get(match.key)
        if match.kind is not MatchKind.EXACT or chunk is None or chunk.rows is None:
            break
        if chunk.entry.space != space or not is_what_it_says(chunk, match, tokens):
            break
        rows += cut(chunk.rows, 0, len(match.span))
        num_rows = match.span.stop
    return rows if num_rows >= LEAST_SHARED else []


def prefetch(tokens: Sequence[int], parts: Parts, terms: Terms) -> Prefetched:
    """Load the chunks of `tokens` from tiers below memory, while a request is queued.

    No tier is waited for much longer than the model would take to compute the same.
    """
    store = parts.store
    prefetched = Prefetched(store.tiers.memory)
    if not store.tiers.is_deep:
        return prefetched
    compute_s = parts.cost.predict(Work.of(len(tokens), len(tokens), 0))
    patience = store.tiers.patience(store.codec.size(len(tokens)), compute_s)
    if store.tiers.is_shared:
        store.refresh(terms.tenant, patience)
        chunks, keys, space = named_chunks(tokens, parts, terms.tenant)
        store.prefetch_prefix(keys, patience)
        if terms.reuse == "auto":
            known = find(chunks, keys, store.index).num_reused
            with store.tiers.memory.holding(key.prefix for key in keys):
                store.prefetch_moved(np.asarray(tokens[known:], dtype="<u4"), space, patience)
    found = look_up(tokens, parts, terms).matches
    store.tiers.get(list(dict.fromkeys(match.key for match in found)), patience, prefetched.held)
    return prefetched


def look_up(tokens: Sequence[int], parts: Parts, terms: Terms) -> ReusePlan:
    """The stored K/V of `tokens`: the exact prefix and, if allowed, moved text."""
    if terms.reuse == "off":
        return ReusePlan(len(tokens))
    parts.store.settle()
    chunks, keys, space = named_chunks(tokens, parts, terms.tenant)
    plan = find(chunks, keys, parts.store.index, granularity=parts.piece_tokens or 1)
    # Deterministic prefill promises equal bits, which moved K/V cannot give.
    if terms.reuse == "auto" and parts.model.rotations and parts.piece_tokens is None:
        is_same = parts.options.company == "same"
        plan = find_moved(plan, chunks, parts.store.index, space, same_company=is_same)
    return plan


def worthwhile(found: ReusePlan, parts: Parts, terms: Terms) -> ReusePlan:
    """The part of a plan that is expected to be faster than computing it."""
    exact = tuple(match for match in found.matches if match.kind is MatchKind.EXACT)
    if exact == found.matches:
        return found
    exact_only = ReusePlan(found.num_tokens, exact)
    pays = parts.cost.pays(
        work_of(found, parts, terms), work_of(exact_only, parts, terms), MOVED_GAIN
    )
    return found if pays else exact_only


def dropped(found: ReusePlan, wanted: ReusePlan) -> tuple[Span, ...]:
    """Spans found but not wanted: all moved ones, or none."""
    if wanted is found:
        return ()
    return tuple(match.span for match in found.matches if match.kind is MatchKind.MOVED)


def repaired_rows(plan: ReusePlan, parts: Parts, terms: Terms) -> int:
    """Estimate of the moved rows that repair will compute."""
    return parts.repairs[terms.ratio].expected_rows(plan)


def work_of(plan: ReusePlan, parts: Parts, terms: Terms) -> Work:
    """What a prefill on top of `plan` will do."""
    num_rows = plan.num_tokens - plan.num_reused + repaired_rows(plan, parts, terms)
    return Work.of(plan.num_tokens, num_rows, plan.num_reused)


def complete(prefilled: Prefilled, tokens: Sequence[int], parts: Parts) -> torch.Tensor:
    """Compute what is pending; the logits after the last token [1, vocabulary]."""
    rest, corrected = [tokens[position] for position in prefilled.pending], prefilled.corrected
    return parts.model.forward(prefilled.rows, rest, prefilled.pending, corrected=corrected)


def keep(
    prefilled: Prefilled,
    tokens: Sequence[int],
    parts: Parts,
    *,
    tenant: str,
    is_wanted: bool = False,
) -> None:
    """Store the computed K/V of `tokens`, which are the first of its rows.

    K/V before the first moved row is exact. The live spans after it are stored as approximate, up
    to the first moved row that is approximate itself: errors would add up with every move. Moved
    rows are not stored a second time, and nothing is if K/V of the tenant was deleted since.
    """
    rows, space, store = prefilled.rows, prefilled.space, parts.store
    num_deletions = prefilled.num_deletions
    if space != space_of(tenant, parts) or store.num_deletions[tenant] != num_deletions:
        return
    exact, new = tokens[: rows.exact_stop], list[FrameKey]()
    if exact:
        chunks = _split(exact, parts)
        new += commit(rows, chunks, derive(chunks, space), space, store, is_wanted=is_wanted)
    if rows.exact_stop < len(tokens):
        for live, names in approximate_chunks(prefilled, tokens, parts):
            new += commit_approximate(rows, live, names, space, store)
    if space != space_of(tenant, parts):  # deleted meanwhile
        store.delete(store.index.owned_by([Owner(space[:OWNER_BYTES])]))
    elif store.num_deletions[tenant] != num_deletions:
        store.delete(new)


def approximate_chunks(
    prefilled: Prefilled, tokens: Sequence[int], parts: Parts
) -> Iterator[tuple[list[Chunk], list[ContentKey]]]:
    """The chunks to store of live spans after moved text, with their keys."""
    rows, space = prefilled.rows, prefilled.space
    plan = prefilled.plan.before(len(tokens))
    live = [span for span in plan.live if span.start >= rows.exact_stop]
    live[-1] = Span(live[-1].start, len(tokens))
    for span in live:
        if len(span) >= LEAST_MOVED_TOKENS and span.start < plan.approximate_start:
            chunks = _split(tokens[span.start : span.stop], parts, first=span.start)
            yield chunks, [content_key(chunk.tokens, space) for chunk in chunks]


def pin(tokens: list[int], parts: Parts, *, tenant: str, ttl_s: float | None) -> list[FrameKey]:
    """Pin the stored chunks of `tokens`; returns their keys."""
    matches = look_up(tokens, parts, Terms("exact", tenant)).matches
    return parts.store.tiers.pin([match.key for match in matches], ttl_s)


def named_chunks(
    tokens: Sequence[int], parts: Parts, tenant: str
) -> tuple[list[Chunk], list[ChunkKeys], Namespace]:
    """The chunks of a prompt with their keys, and the namespace of these."""
    space = space_of(tenant, parts)
    chunks = _split(tokens, parts)
    return chunks, derive(chunks, space), space


def _split(tokens: Sequence[int], parts: Parts, first: int = 0) -> list[Chunk]:
    """The chunks of tokens from position `first` on."""
    options = parts.options
    chunks = split(tokens, options.chunk_size, options.chunk_boundary_window, parts.boundaries)
    moved = [Span(c.span.start + first, c.span.stop + first) for c in chunks]
    return [Chunk(span, chunk.tokens) for span, chunk in zip(moved, chunks, strict=True)]


def space_of(tenant: str, parts: Parts) -> Namespace:
    """The namespace of what a tenant stores under the adapter of `parts`."""
    store = parts.store
    return namespace(
        parts.model.fingerprint,
        tenant,
        parts.piece_tokens,
        store.codec.name,
        store.epochs.of(tenant),
    )
