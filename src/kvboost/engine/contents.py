"""The stored chunks of a tenant: listed, pinned, deleted, and used to arrange documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvboost.build import Parts
from kvboost.core import FrameKey, ReuseMode
from kvboost.engine.arrangement import Arrangement
from kvboost.engine.prefill import Terms, look_up, named_chunks, pin, prefetch, space_of
from kvboost.engine.request import DocumentOrder
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.core import Entry

SHOWN_TOKENS = 16  # of each chunk in a list
ERASING_S = 5.0  # that a deletion waits for tiers below memory


@dataclass(frozen=True)
class Deletion:
    """Result of a deletion: requests cannot hit the deleted chunks any more.

    Tiers in `pending` still hold some of the bytes, because they are slow or cannot be reached.
    The engine retries until it is closed.
    """

    num_deleted: int  #: chunks known to this process
    pending: tuple[str, ...] = ()  #: names of tiers


@dataclass(frozen=True)
class Contents:
    """The stored chunks of all adapters. Thread-safe."""

    _parts: Parts
    _tokenizer: Any

    def chunks(self, tenant: str, limit: int) -> list[dict[str, Any]]:
        """At most `limit` chunks of a tenant, with the start of their text."""
        store = self._parts.store
        return [
            {
                "key": entry.key.hex(),
                "kind": entry.provenance.value,
                "num_tokens": entry.num_tokens,
                "position": entry.home,
                "is_in_memory": store.tiers.memory.holds(entry.key),
                "text": self._tokenizer.decode(
                    np.frombuffer(entry.tokens, "<u4")[:SHOWN_TOKENS].tolist()
                ),
            }
            for entry in islice(self._entries(tenant, limit), limit)
        ]

    def arrangement(
        self, order: DocumentOrder, tenant: str, adapter: str | None
    ) -> Arrangement | None:
        """The arrangement of a prompt's documents, if their order may change."""
        if order == "given":
            return None
        if order != "any":
            raise ConfigError(f"order={order!r}: expected 'given' or 'any'")
        parts = self._parts.under(self._parts.model.adapters.find(adapter))

        def num_known(tokens: list[int], reuse: ReuseMode) -> int:
            return look_up(tokens, parts, Terms(reuse, tenant)).num_reused if tokens else 0

        return Arrangement(
            lambda tokens: num_known(tokens, "exact"),
            lambda tokens: 2 * num_known(tokens, "auto") >= len(tokens),
        )

    def pin(self, tokens: list[int], *, tenant: str, ttl_s: float | None) -> int:
        """Pin the stored chunks of a text, and return how many there are."""
        if not tokens:
            return 0
        return sum(
            len(pin(tokens, each, tenant=tenant, ttl_s=ttl_s)) for each in self._parts.variants
        )

    def delete(self, tokens: list[int] | None, *, tenant: str) -> Deletion:
        """Delete the chunks of a text, or all of the tenant (None), in every tier.

        Pinned chunks are deleted too. Processes that reach the shared tier stop hitting a deleted
        tenant's chunks at once; of a single text, they may keep copies in memory.
        """
        store = self._parts.store
        if tokens == []:
            return Deletion(0)
        if tokens is None:
            num_deleted = store.delete_all(tenant, store.tiers.patience())
        else:
            store.num_deletions[tenant] += 1
            num_deleted = sum(self._delete_text(tokens, tenant, p) for p in self._parts.variants)
            store.num_deletions[tenant] += 1  # for requests that have begun meanwhile
        return Deletion(num_deleted, tuple(store.tiers.not_erased(ERASING_S)))

    def _delete_text(self, tokens: list[int], tenant: str, parts: Parts) -> int:
        prefetch(tokens, parts, Terms("auto", tenant)).release()  # shared tiers may have more of it
        index = parts.store.index
        chunks, keys, space = named_chunks(tokens, parts, tenant)
        wanted: set[FrameKey] = {key.prefix for key in keys}
        for chunk, key in zip(chunks, keys, strict=True):
            longer = index.extension(key.parent, chunk.tokens)
            if longer is not None:
                wanted.add(longer.key)
        # And the same text inside other prompts; chunks that only overlap with it stay.
        wanted.update(index.within(b"".join(chunk.tokens for chunk in chunks), space))
        return parts.store.delete(wanted)

    def _entries(self, tenant: str, limit: int) -> Iterator[Entry]:
        """A tenant's entries, adapter by adapter, at most `limit` of each."""
        for parts in self._parts.variants:
            yield from parts.store.index.entries(space_of(tenant, parts), limit)
