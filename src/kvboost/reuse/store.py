"""K/V in its slots -> tier and index. Takes what was computed anyway; encodes nothing twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvboost.codecs.base import Codec
from kvboost.core import Chunk, ChunkKeys, Entry, Provenance
from kvboost.errors import CacheError
from kvboost.metrics import Metrics
from kvboost.tiers.base import Tier
from kvboost.tiers.index import ChunkIndex

if TYPE_CHECKING:
    from kvboost.models.base import Slots

log = logging.getLogger(__name__)


def commit(
    slots: Slots,
    chunks: Sequence[Chunk],
    keys: Sequence[ChunkKeys],
    index: ChunkIndex,
    tier: Tier,
    codec: Codec,
    metrics: Metrics,
) -> None:
    """Store the chunks that the store does not hold yet.

    `slots` must hold their K/V and must not be written meanwhile. Only exact K/V gets a prefix
    key. A last chunk that is the head of a longer stored one is not stored, and a stored one that
    a new chunk extends is dropped.
    """
    if slots.provenance is not Provenance.EXACT:
        return
    pairs = list(zip(chunks, keys, strict=True))
    try:
        # Last chunk first: the tier forgets the oldest first, and a chunk is of no use without
        # the ones before it.
        for chunk, key in reversed(pairs):
            is_tail = chunk is chunks[-1]
            if is_tail and index.has_extension(key.parent, chunk.tokens):
                continue
            if index.get(key.prefix) is None:
                _put(slots, chunk, key, index, tier, codec, metrics)
    except CacheError as error:
        log.warning("cache fault while storing, the answer is not affected: %s", error)
        metrics.add("cache_faults")


def _put(
    slots: Slots,
    chunk: Chunk,
    key: ChunkKeys,
    index: ChunkIndex,
    tier: Tier,
    codec: Codec,
    metrics: Metrics,
) -> None:
    evicted = tier.put(key.prefix, codec.encode(slots.read(chunk.span)))
    for gone in evicted:
        index.remove(gone)
    if key.prefix in evicted:
        return
    index.add(Entry(chunk.tokens, key.content, slots.provenance, key.prefix, key.parent))
    metrics.add("stored_chunks")
    metrics.add("evicted_chunks", len(evicted))
    shorter = index.childless_head(key.parent, chunk.tokens)
    if shorter is not None and tier.discard(shorter):
        index.remove(shorter)
