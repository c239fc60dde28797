"""What the store holds for a tenant: listed, pinned and deleted by an operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvboost.build import Parts
from kvboost.engine.prefill import Terms, look_up, pin, space_of
from kvboost.engine.worker import Worker

if TYPE_CHECKING:
    from kvboost.core import Entry, FrameKey

SHOWN_TOKENS = 16  # of each chunk in a list
AT_ONCE = 1000  # chunks that are deleted before requests have their turn again


@dataclass(frozen=True)
class Contents:
    """The stored chunks, under whatever adapter. Calls wait for their turn between requests."""

    _parts: Parts
    _tokenizer: Any
    _worker: Worker

    def chunks(self, tenant: str, limit: int) -> list[dict[str, Any]]:
        """Some chunks of a tenant, at most `limit`, with the beginning of their text."""
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

    def pin(self, tokens: list[int], *, tenant: str, ttl_s: float | None) -> int:
        """Keep the stored chunks of a text from leaving; how many they are."""
        works = [
            partial(pin, tokens, each, tenant=tenant, ttl_s=ttl_s) for each in self._parts.variants
        ]
        return sum(map(self._worker.call, works))

    def delete(self, tokens: list[int] | None, *, tenant: str) -> int:
        """Forget the stored chunks of a text, or of the tenant; how many. Pinned ones too."""
        if tokens is not None:
            return self._worker.call(partial(self._forget_text, tokens, tenant))
        num_all = len(self._parts.store.index)
        keys = [entry.key for entry in self._entries(tenant, num_all)]
        batches = [keys[start : start + AT_ONCE] for start in range(0, len(keys), AT_ONCE)]
        return sum(self._worker.call(partial(self._forget, batch)) for batch in batches)

    def _forget_text(self, tokens: list[int], tenant: str) -> int:
        terms = Terms("exact", tenant)
        found = [look_up(tokens, each, terms).matches for each in self._parts.variants]
        return self._forget([match.key for matches in found for match in matches])

    def _forget(self, keys: list[FrameKey]) -> int:
        store = self._parts.store
        store.tiers.memory.unpin(keys)
        gone = [key for key in keys if store.tiers.discard(key)]
        for key in gone:
            store.index.remove(key)
        return len(gone)

    def _entries(self, tenant: str, limit: int) -> Iterator[Entry]:
        """Those of a tenant under one adapter after the other, of each at most `limit`."""
        for parts in self._parts.variants:
            yield from parts.store.index.entries(space_of(tenant, parts), limit)
