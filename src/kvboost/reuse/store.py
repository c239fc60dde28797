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
    key. A chunk that is the head of a longer stored one is not stored, and a stored one that a
    new chunk extends is dropped.
    """
    if slots.provenance is not Provenance.EXACT:
        return
    try:
        # Last chunk first: the tier forgets the oldest first, and a chunk is of no use without
        # the ones before it.
        for chunk, key in reversed(list(zip(chunks, keys, strict=True))):
            if index.get(key.prefix) is not None or index.has_extension(key.parent, chunk.tokens):
                continue
            gone = tier.put(key.prefix, codec.encode(slots.read(chunk.span)))
            metrics.add("stored_chunks")
            metrics.add("evicted_chunks", len(gone))
            shorter = index.childless_head(key.parent, chunk.tokens)
            if shorter is not None and key.prefix not in gone and tier.discard(shorter):
                gone.append(shorter)
            index.add(Entry(chunk.tokens, key.content, slots.provenance, key.prefix, key.parent))
            for evicted in gone:
                index.remove(evicted)
    except CacheError as error:
        log.warning("cache fault while storing, the answer is not affected: %s", error)
        metrics.add("cache_faults")
