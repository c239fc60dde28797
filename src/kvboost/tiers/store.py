"""The chunk store: index, tiers and codec, for the stages that load and store K/V."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvboost.codecs.base import Codec
from kvboost.core import Anchor, ChunkKeys, Entry, FrameKey, Namespace
from kvboost.metrics import Metrics
from kvboost.tiers import anchors
from kvboost.tiers.base import OwnTier, StoredChunk, Tier
from kvboost.tiers.epochs import (
    Epochs,
    Erasure,
    epoch_key,
    past_owners,
)
from kvboost.tiers.guarded import Patience
from kvboost.tiers.index import ChunkIndex
from kvboost.tiers.notes import after, check_note, read_note, where, write_note
from kvboost.tiers.stack import TierStack

NUM_REMEMBERED = 4096  # evicted keys, for explanations
ADOPTED_AT_ONCE = 64


@dataclass(frozen=True)
class ChunkStore:
    """Keys and anchors of chunks in the index, their bytes in the tiers."""

    index: ChunkIndex
    tiers: TierStack
    codec: Codec
    metrics: Metrics
    # Held while a frame is made, so that one at a time exceeds memory's budget.
    writing: threading.Lock = field(default_factory=threading.Lock)
    _learning: threading.Lock = field(default_factory=threading.Lock)
    epochs: Epochs = field(default_factory=Epochs)
    num_deletions: Counter[str] = field(default_factory=Counter)  # of single texts, by tenant
    _evicted: OrderedDict[FrameKey, None] = field(default_factory=OrderedDict)

    def has(self, key: FrameKey) -> bool:
        """Whether a chunk is stored in a tier that works."""
        return self.index.get(key) is not None and self.tiers.has_at_hand(key)

    def settle(self) -> None:
        """Drop chunks from the index that left the tiers, and remember the latest of them."""
        with self._learning:
            gone = [key for key in self.tiers.take_gone() if not self.tiers.holds(key)]
            for key in gone:
                self.index.remove(key)
                self._evicted[key] = None
        self.metrics.add("evicted_chunks", len(gone))
        while len(self._evicted) > NUM_REMEMBERED:
            self._evicted.popitem(last=False)

    def was_evicted(self, key: FrameKey) -> bool:
        """Whether a chunk is known to have been evicted."""
        return key in self._evicted and self.index.get(key) is None

    def forget(self, keys: Iterable[FrameKey]) -> None:
        """Drop chunks from the index whose bytes no tier has, so that they are stored again."""
        for key in keys:
            if not self.tiers.holds(key):
                self.index.remove(key)

    def refresh(self, tenant: str, patience: Patience) -> None:
        """Check whether another process has deleted the tenant's chunks."""
        key, known = epoch_key(tenant), self.epochs.of(tenant)
        epoch = self.tiers.epoch(key, patience)
        if epoch is not None and epoch > known:
            self._begin_epoch(tenant, epoch, is_told=True)
        elif epoch is not None and epoch < known:  # the server has lost it
            self.tiers.raise_epoch(key, known)

    def delete_all(self, tenant: str, patience: Patience) -> int:
        """Forget all chunks of a tenant in all tiers and processes; returns how many were known."""
        self.refresh(tenant, patience)
        return self._begin_epoch(tenant, self.epochs.of(tenant) + 1)

    def delete(self, keys: Iterable[FrameKey]) -> int:
        """Forget chunks in every tier, known or not; returns how many were known."""
        wanted = frozenset(keys)
        known = [key for key in wanted if self.index.get(key) is not None]
        self.tiers.erase(Erasure(wanted))
        for key in known:
            self.index.remove(key)
        return len(known)

    def _begin_epoch(self, tenant: str, epoch: int, *, is_told: bool = False) -> int:
        """Forget the tenant's chunks; `is_told`: another process began the epoch."""
        key, owners = epoch_key(tenant), past_owners(tenant, self.epochs.of(tenant), epoch)
        self.epochs.learn(key, epoch)
        keys = self.index.owned_by(owners)

        def delete_later_ones(there: int) -> None:
            """Somebody began this epoch before us, and things were stored since."""
            self._begin_epoch(tenant, max(there, self.epochs.of(tenant)) + 1)

        outdated: Callable[[int], object] = (lambda _: None) if is_told else delete_later_ones
        erasure = Erasure(frozenset(keys), frozenset(owners), (key, epoch), outdated)
        self.tiers.erase(erasure, is_told=is_told)
        for each in keys:
            self.index.remove(each)
        return len(keys)

    def adopt(self, tier: Tier) -> Iterator[None]:
        """Index a tier's chunks from earlier processes, some in each step."""
        if isinstance(tier, OwnTier):
            for key, epoch in tier.epochs().items():
                self.epochs.learn(key, epoch)
            heads = iter(tier.heads())
            while some := list(islice(heads, ADOPTED_AT_ONCE)):
                with self._learning:  # chunks may be evicted meanwhile
                    for head in some:
                        if tier.holds(head.entry.key):
                            self.index.add(head.entry, head.anchors)
                yield

    def prefetch(
        self, keys: Sequence[FrameKey], patience: Patience, *, in_order: bool = False
    ) -> None:
        """Load chunks from shared tiers into memory, and learn of those that others have stored.

        `in_order` says that a chunk is of no use unless all before it were found.
        """
        wanted = [key for key in keys if not self.tiers.has_at_hand(key)]
        with self.tiers.memory.holding(keys):  # or loading the rest would evict them
            for chunk in self.tiers.load(wanted, patience, in_order=in_order).values():
                self._learn(chunk)

    def prefetch_prefix(self, keys: Sequence[ChunkKeys], patience: Patience) -> None:
        """Load a prompt's chunks, and one that begins like the first missing one."""
        self.prefetch([key.prefix for key in keys], patience, in_order=True)
        missing = next((key for key in keys if self.index.get(key.prefix) is None), None)
        if missing is not None:
            noted = self._noted([after(missing.parent)], patience)
            self.prefetch([key for key, _ in noted.values()], patience)

    def prefetch_moved(
        self, tokens: npt.NDArray[np.uint32], space: Namespace, patience: Patience
    ) -> None:
        """Load the stored parts of a text, from any position."""
        _, hashes = anchors.pick(tokens, anchors.salt(space))
        seen = {anchor: self.index.sightings(anchor, space) for anchor in hashes.tolist()}
        keys = [found[0][0].key for found in seen.values() if found]
        unseen = {where(anchor, space): anchor for anchor, found in seen.items() if not found}
        noted = self._noted(list(unseen), patience)
        keys += [key for key, _ in noted.values()]
        self.prefetch(list(dict.fromkeys(keys)), patience)
        for note, (key, offset) in noted.items():
            entry = self.index.get(key)
            if entry is not None and offset < entry.num_tokens:
                self.index.add(entry, [(offset, unseen[note])])

    def publish(self, entry: Entry, anchors_in_it: Iterable[Anchor]) -> None:
        """Write notes by which other processes find an entry: by its anchors, and by its parent."""
        offsets = {where(anchor, entry.space): offset for offset, anchor in anchors_in_it}
        if entry.prefix is not None and entry.parent is not None:
            offsets[after(entry.parent)] = 0
        notes = {note: write_note(note, entry.key, offset) for note, offset in offsets.items()}
        self.tiers.put_notes(notes)

    def _learn(self, chunk: StoredChunk) -> None:
        """Index a chunk, unless it was evicted already."""
        key = chunk.entry.key
        with self._learning:
            self.index.add(chunk.entry, chunk.anchors)
            if not self.tiers.holds(key):
                self.index.remove(key)

    def _noted(
        self, notes: Sequence[FrameKey], patience: Patience
    ) -> dict[FrameKey, tuple[FrameKey, int]]:
        found = self.tiers.get_notes(notes, check_note, patience)
        return {key: read_note(note) for key, note in found.items()}
