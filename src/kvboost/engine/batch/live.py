"""Which prompts are in the batch now, by their chunks: whoever begins alike shares their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvboost.core import ChunkKeys, PrefixKey, Span

if TYPE_CHECKING:
    from kvboost.models.rows import Rows

LEAST_SHARED = 128  # tokens; below, attention in two parts costs more than it saves


@dataclass(eq=False)
class Owner:
    """A prompt of the batch, and how many of its first rows are there to be shared."""

    rows: Rows | None = None  # before its request starts and after it has ended
    num_ready: int = 0

    def close(self) -> None:
        """Give the rows back, if there are any; nobody can share them from now on."""
        rows, self.rows = self.rows, None
        if rows is not None:
            rows.close()


class LivePrompts:
    """Owners by the keys of their exact chunks, as long as their requests run."""

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[PrefixKey, Owner] = WeakValueDictionary()

    def add(self, owner: Owner, keys: Sequence[ChunkKeys]) -> None:
        """Make a prompt known; the first one of several that begin alike stays the owner."""
        for key in keys:
            if self._get(key.prefix) is None:
                self._owners[key.prefix] = owner

    def find(self, keys: Sequence[ChunkKeys], spans: Sequence[Span]) -> tuple[Owner | None, int]:
        """Who begins like a prompt, and for how many tokens; (None, 0) if nobody does."""
        best: tuple[Owner | None, int] = (None, 0)
        for key, span in zip(keys, spans, strict=True):
            owner = self._get(key.prefix)
            if owner is None:
                break
            best = (owner, span.stop)
        return best if best[1] >= LEAST_SHARED else (None, 0)

    def _get(self, key: PrefixKey) -> Owner | None:
        owner = self._owners.get(key)
        return None if owner is None or owner.rows is None else owner
