"""What the store holds for a tenant: listed, pinned and deleted by an operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvboost.build import Parts
from kvboost.engine.prefill import Terms, look_up, named_chunks, pin
from kvboost.engine.worker import Worker

if TYPE_CHECKING:
    from kvboost.core import FrameKey

SHOWN_TOKENS = 16  # of each chunk in a list
AT_ONCE = 1000  # chunks that are deleted before requests have their turn again


@dataclass(frozen=True)
class Contents:
    """The stored chunks. Calls wait for their turn between requests."""

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
            for entry in store.index.entries(self._space(tenant), limit)
        ]

    def pin(self, tokens: list[int], *, tenant: str, ttl_s: float | None) -> int:
        """Keep the stored chunks of a text from leaving; how many they are."""
        return self._worker.call(partial(pin, tokens, self._parts, tenant=tenant, ttl_s=ttl_s))

    def delete(self, tokens: list[int] | None, *, tenant: str) -> int:
        """Forget the stored chunks of a text, or of the tenant; how many. Pinned ones too."""
        if tokens is not None:
            return self._worker.call(partial(self._forget_text, tokens, tenant))
        index = self._parts.store.index
        keys = [entry.key for entry in index.entries(self._space(tenant), len(index))]
        batches = [keys[start : start + AT_ONCE] for start in range(0, len(keys), AT_ONCE)]
        return sum(self._worker.call(partial(self._forget, batch)) for batch in batches)

    def _forget_text(self, tokens: list[int], tenant: str) -> int:
        matches = look_up(tokens, self._parts, Terms("exact", tenant)).matches
        return self._forget([match.key for match in matches])

    def _forget(self, keys: list[FrameKey]) -> int:
        store = self._parts.store
        store.tiers.memory.unpin(keys)
        gone = [key for key in keys if store.tiers.discard(key)]
        for key in gone:
            store.index.remove(key)
        return len(gone)

    def _space(self, tenant: str) -> Any:
        return named_chunks([], self._parts, tenant)[2]
