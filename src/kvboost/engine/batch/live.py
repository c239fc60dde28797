"""Prompts that are in the batch now, by their prefix keys: equal prefixes share rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost.core import ChunkKeys, PrefixKey, Span
from kvboost.models.packed import LEAST_SHARED

if TYPE_CHECKING:
    from kvboost.models.rows import Rows


@dataclass(eq=False)
class LivePrompt:
    """A prompt in the batch, and how many of its first rows others can share."""

    rows: Rows | None = None  # before its request starts, and after it has ended
    num_ready: int = 0
    names: tuple[PrefixKey, ...] = ()  # prefix keys of its exact chunks, once it is listed

    def close(self) -> None:
        """Give its rows back, if it has any."""
        rows, self.rows = self.rows, None
        if rows is not None:
            rows.release()


class LivePrompts:
    """The prompts in the batch by the prefix keys of their exact chunks; several may have one."""

    def __init__(self) -> None:
        self._prompts: dict[PrefixKey, list[LivePrompt]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: LivePrompt, keys: Sequence[ChunkKeys]) -> None:
        """List a prompt."""
        prompt.names = tuple(key.prefix for key in keys)
        for name in prompt.names:
            self._prompts.setdefault(name, []).append(prompt)

    def remove(self, prompt: LivePrompt) -> None:
        """Take a prompt off the list, if it is on it: nobody may wait for it any more."""
        for name in prompt.names:
            self._prompts[name].remove(prompt)
            if not self._prompts[name]:
                del self._prompts[name]
        prompt.names = ()

    def find(
        self, keys: Sequence[ChunkKeys], spans: Sequence[Span]
    ) -> tuple[LivePrompt | None, int]:
        """The prompt with the longest common prefix, and its length; (None, 0) if too short."""
        alike: list[LivePrompt] = []
        num_alike = 0
        for key, span in zip(keys, spans, strict=True):
            if key.prefix not in self._prompts:
                break
            alike, num_alike = self._prompts[key.prefix], span.stop
        if num_alike < LEAST_SHARED:
            return None, 0
        return max(alike, key=lambda prompt: min(num_alike, prompt.num_ready)), num_alike
