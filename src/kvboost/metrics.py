"""What the engine counts, by name, in one place."""

from __future__ import annotations

import threading
from collections import Counter

NAMES = {
    "requests": "requests answered",
    "prompt_tokens": "prompt tokens seen",
    "exact_tokens": "prompt tokens taken from the store with their own history",
    "exact_hits": "chunks taken from the store with their own history",
    "moved_tokens": "prompt tokens taken from the store with another history",
    "moved_hits": "chunks taken from the store with another history",
    "repaired_tokens": "moved prompt tokens that were computed again",
    "audits": "answers on moved K/V that were compared with full prefill",
    "misses": "chunks that had to be computed",
    "stored_chunks": "chunks put into the store",
    "evicted_chunks": "chunks that left the store to keep its budget",
    "loaded_chunks": "chunks brought into memory from a tier below it",
    "dropped_writes": "chunks not written below memory: too many waited, refused, or down",
    "tier_faults": "failures and timeouts of tiers below memory, which became misses",
    "damaged_frames": "frames that did not pass their check, which became misses",
}


class Metrics:
    """Thread-safe counters with fixed names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter; the name must be one of `NAMES`."""
        if name not in NAMES:
            raise KeyError(name)
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment, zeros included."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}
