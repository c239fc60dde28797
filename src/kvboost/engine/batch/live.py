"""Which prompts are in the batch now, by their chunks: whoever begins alike shares their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost.core import ChunkKeys, PrefixKey, Span
from kvboost.models.packed import LEAST_SHARED

if TYPE_CHECKING:
    from kvboost.models.rows import Rows


@dataclass(eq=False)
class Owner:
    """A prompt of the batch, and how many of its first rows are there to be shared."""

    rows: Rows | None = None  # before its request starts, and after it has ended
    num_ready: int = 0
    names: tuple[PrefixKey, ...] = ()  # of its exact chunks, once it is known

    def close(self) -> None:
        """Give its rows back, if it has any."""
        rows, self.rows = self.rows, None
        if rows is not None:
            rows.release()


class LivePrompts:
    """Owners by the names of their exact chunks. Who begins alike can each be asked."""

    def __init__(self) -> None:
        self._owners: dict[PrefixKey, list[Owner]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, owner: Owner, keys: Sequence[ChunkKeys]) -> None:
        """Make a prompt known."""
        owner.names = tuple(key.prefix for key in keys)
        for name in owner.names:
            self._owners.setdefault(name, []).append(owner)

    def remove(self, owner: Owner) -> None:
        """Forget a prompt, if it is known: its request has ended, and nobody may wait for it."""
        for name in owner.names:
            self._owners[name].remove(owner)
            if not self._owners[name]:
                del self._owners[name]
        owner.names = ()

    def find(self, keys: Sequence[ChunkKeys], spans: Sequence[Span]) -> tuple[Owner | None, int]:
        """Who begins like a prompt, and for how many tokens; (None, 0) if nobody does."""
        alike: list[Owner] = []
        num_alike = 0
        for key, span in zip(keys, spans, strict=True):
            if key.prefix not in self._owners:
                break
            alike, num_alike = self._owners[key.prefix], span.stop
        if num_alike < LEAST_SHARED:
            return None, 0
        return max(alike, key=lambda owner: min(num_alike, owner.num_ready)), num_alike
