"""Sizes and counts of an engine, as `cache_stats` shows them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvboost.build import Parts
from kvboost.metrics import OTHER_TENANTS
from kvboost.tiers.epochs import owner


def cache_stats(parts: Parts) -> dict[str, Any]:
    """What is stored now, and what was counted since the engine was made."""
    counts, tiers = parts.metrics.snapshot(), parts.store.tiers
    memory = tiers.memory.stats()
    exact, moved = counts["exact_hits"], counts["moved_hits"]
    chunks = max(1, exact + moved + counts["misses"])
    return {
        "hot_chunks": memory.num_entries,
        "hot_memory_mb": memory.size_bytes / 2**20,
        "budget_mb": memory.budget_bytes / 2**20,
        "pinned_chunks": tiers.memory.num_pinned,
        "cache_hits": exact + moved,
        "approximate_hits": moved,
        "cache_misses": counts["misses"],
        "hit_rate": (exact + moved) / chunks,
        "exact_hit_rate": exact / chunks,
        "index_mb": parts.store.index.size_bytes / 2**20,
        "quality": parts.guard.snapshot(),
        "tenants": _tenants(parts, memory.size_bytes),
        "adapters": {name: _row(each) for name, each in parts.metrics.adapters().items()},
        "tiers": tiers.stats(),
        **counts,
    }


def _tenants(parts: Parts, size_bytes: int) -> dict[str, dict[str, int]]:
    """By tenant: requests, hits, misses, and what of memory's `size_bytes` is his."""
    memory = parts.store.tiers.memory
    rows = {}
    for tenant, counts in parts.metrics.tenants().items():
        whose = owner(tenant, parts.store.epochs.of(tenant))
        rows[tenant] = {**_row(counts), "memory_bytes": memory.held_bytes(whose)}
    if OTHER_TENANTS in rows:
        known_bytes = sum(row["memory_bytes"] for row in rows.values())
        rows[OTHER_TENANTS]["memory_bytes"] = max(0, size_bytes - known_bytes)
    return rows


def _row(counts: Counter[str]) -> dict[str, int]:
    exact, moved = counts["exact_hits"], counts["moved_hits"]
    return {
        "requests": counts["requests"],
        "prompt_tokens": counts["prompt_tokens"],
        "exact_tokens": counts["exact_tokens"],
        "moved_tokens": counts["moved_tokens"],
        "cache_hits": exact + moved,
        "approximate_hits": moved,
        "cache_misses": counts["misses"],
    }
