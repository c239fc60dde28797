"""The engine's counters: their names, meanings and values."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection

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
    "warmed_tokens": "tokens computed ahead of any request",
    "promoted_tokens": "tokens answered on moved K/V that were prefilled exactly in idle time",
    "stored_chunks": "chunks put into the store",
    "evicted_chunks": "chunks that left the store to keep its budget",
    "loaded_chunks": "chunks brought into memory from a tier below it",
    "dropped_writes": "chunks not written: too many waited, refused, or a tier was down",
    "tier_faults": "failures and timeouts of tiers below memory, which became misses",
    "damaged_frames": "frames that did not pass their check, which became misses",
    "foreign_frames": "frames of another tenant, adapter or model, which became misses",
}

MOST_TENANTS = 256  # counted one by one; later ones are counted together
OTHER_TENANTS = "(others)"


def counted_as(tenant: str, known: Collection[str]) -> str:
    """The name under which a tenant is counted, given the known ones."""
    return tenant if tenant in known or len(known) < MOST_TENANTS else OTHER_TENANTS


class Metrics:
    """Thread-safe counters with fixed names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._of_tenants: dict[str, Counter[str]] = {}
        self._of_adapters: dict[str, Counter[str]] = {}

    def add(
        self, name: str, amount: int = 1, *, tenant: str | None = None, adapter: str | None = None
    ) -> None:
        """Raise a counter, also for a tenant and an adapter; the name is one of `NAMES`."""
        if name not in NAMES:
            raise KeyError(name)
        with self._lock:
            self._counts[name] += amount
            if tenant is not None:
                known = counted_as(tenant, self._of_tenants)
                self._of_tenants.setdefault(known, Counter())[name] += amount
            if adapter is not None:
                self._of_adapters.setdefault(adapter, Counter())[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment, zeros included."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}

    def tenants(self) -> dict[str, Counter[str]]:
        """The counters of each tenant; those that were never raised are missing."""
        with self._lock:
            return {tenant: Counter(counts) for tenant, counts in self._of_tenants.items()}

    def adapters(self) -> dict[str, Counter[str]]:
        """The counters of each adapter; the base model has an empty name."""
        with self._lock:
            return {adapter: Counter(counts) for adapter, counts in self._of_adapters.items()}
