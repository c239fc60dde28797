"""K/V in its slots -> tier and index. Takes what was computed anyway; stores nothing twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from kvboost.core import (
    Anchor,
    Chunk,
    ChunkKeys,
    ContentKey,
    Entry,
    FrameKey,
    Namespace,
    Provenance,
)
from kvboost.errors import KVBoostError
from kvboost.tiers import anchors
from kvboost.tiers.store import ChunkStore

if TYPE_CHECKING:
    from kvboost.models.base import Slots

log = logging.getLogger(__name__)


def commit(
    slots: Slots,
    chunks: Sequence[Chunk],
    keys: Sequence[ChunkKeys],
    space: Namespace,
    store: ChunkStore,
    *,
    is_wanted: bool = False,
) -> list[FrameKey]:
    """Store exact chunks, which are the whole prompt from its start, under their prefix keys.

    `slots` must hold their K/V and must not be written meanwhile. With `is_wanted`, chunks
    replace others that are used more, if all of them take at most half of memory. A last chunk
    that is the head of a longer stored one is not stored, and a stored one that a new chunk extends
    is dropped. Returns the new keys.
    """
    if chunks and chunks[-1].span.stop > slots.exact_stop:
        raise ValueError("approximate K/V must not be stored under a prefix key")
    index = store.index
    entries = [
        Entry(chunk.tokens, Provenance.EXACT, key.prefix, None, key.parent, chunk.span.start, space)
        for chunk, key in zip(chunks, keys, strict=True)
    ]
    longer = index.extension(keys[-1].parent, chunks[-1].tokens) if chunks else None
    is_there = longer is not None and store.tiers.has_at_hand(longer.key)
    wanted = entries[:-1] if is_there else entries
    new = _put_new(slots, chunks, wanted, store, is_wanted=is_wanted)
    for entry in new:
        assert entry.parent is not None
        shorter = index.childless_head(entry.parent, entry.tokens)
        if shorter is not None and store.tiers.discard(shorter):
            index.remove(shorter)
    return [entry.key for entry in new]


def commit_approximate(
    slots: Slots,
    chunks: Sequence[Chunk],
    keys: Sequence[ContentKey],
    space: Namespace,
    store: ChunkStore,
) -> list[FrameKey]:
    """Store chunks that were computed one after another on top of moved K/V, by their content.

    Returns the new keys.
    """
    parents = [None, *keys[:-1]]
    entries = [
        Entry(chunk.tokens, Provenance.APPROXIMATE, None, key, parent, chunk.span.start, space)
        for chunk, key, parent in zip(chunks, keys, parents, strict=True)
    ]
    return [entry.key for entry in _put_new(slots, chunks, entries, store)]


def _put_new(
    slots: Slots,
    chunks: Sequence[Chunk],
    entries: Sequence[Entry],
    store: ChunkStore,
    *,
    is_wanted: bool = False,
) -> list[Entry]:
    """Store the entries that the store does not hold yet, and return them."""
    new: list[Entry] = []
    memory = store.tiers.memory
    most_bytes = memory.stats().budget_bytes // 2
    anchors_of = dict(zip(entries, _anchors_by_chunk(chunks, entries), strict=True))
    pairs = zip(chunks, entries, strict=False)
    missing = {entry.key: (chunk, entry) for chunk, entry in pairs if not store.has(entry.key)}
    num_tokens = sum(len(chunk.span) for chunk, _ in missing.values())
    # Last chunk first: the tier forgets the oldest first, and a chunk is useless without the
    # ones before it. What is wanted is held until all is in, or it would be evicted for the rest.
    with ExitStack() as holds:
        for chunk, entry in reversed(missing.values()):
            words = anchors_of[entry]
            try:
                with store.writing:
                    stored = store.tiers.medium.from_slots(entry, slots, chunk.span, words)
                    is_wanted &= stored.nbytes * num_tokens <= most_bytes * len(chunk.span)
                    if store.tiers.put(entry.key, stored, is_wanted=is_wanted):
                        new.append(entry)
                        is_wanted = is_wanted and memory.hold(entry.key)
                        if is_wanted:
                            holds.callback(memory.release, entry.key)
            except KVBoostError as error:  # the pool is full of pinned or running K/V
                log.debug("a chunk is not stored: %s", error)
            if not is_wanted:
                holds.close()
    new = [entry for entry in reversed(new) if store.tiers.holds(entry.key)]
    store.tiers.send_below(entry.key for entry in new)
    store.metrics.add("stored_chunks", len(new))
    store.settle()
    stored_now = set(new)
    for entry, words in anchors_of.items():
        # A copy that was there already may be from another position, if its key is of its content.
        known_as = entry if entry in stored_now else store.index.get(entry.key)
        if known_as is not None and store.tiers.holds(entry.key):
            store.index.add(known_as, words)
    for entry in new:
        store.publish(entry, anchors_of[entry])
    return new


def _anchors_by_chunk(chunks: Sequence[Chunk], entries: Sequence[Entry]) -> list[list[Anchor]]:
    """The anchors that start in the chunk of each entry."""
    if not entries:
        return []
    tokens = np.frombuffer(b"".join(chunk.tokens for chunk in chunks), dtype="<u4")
    positions, hashes = anchors.pick(tokens, anchors.salt(entries[0].space))
    starts = np.array([chunk.span.start for chunk in chunks]) - chunks[0].span.start
    owners = np.searchsorted(starts, positions, side="right") - 1
    found: list[list[Anchor]] = [[] for _ in chunks]
    for owner, position, anchor in zip(
        owners.tolist(), positions.tolist(), hashes.tolist(), strict=True
    ):
        found[owner].append((position - int(starts[owner]), anchor))
    return found[: len(entries)]
