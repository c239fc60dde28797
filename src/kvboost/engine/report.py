"""Reports of reuse, span by span, and the statistics of an engine."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from kvboost.build import Parts
from kvboost.config import EXACT_BITS
from kvboost.core import MatchKind, ReusePlan, Run, Span, counted
from kvboost.engine.prefill import Prefilled
from kvboost.engine.request import Request
from kvboost.engine.results import ReuseReport, SpanReport
from kvboost.metrics import OTHER_TENANTS
from kvboost.policy.cost import Work
from kvboost.tiers.epochs import owner


def report(
    prefilled: Prefilled | None,
    num_tokens: int,
    parts: Parts,
    note: str,
    first_token_at: float,
) -> ReuseReport:
    """The report of a request that ran."""
    if prefilled is None:
        return ReuseReport(spans=describe(ReusePlan(num_tokens), parts), note=note)
    return ReuseReport(
        spans=describe(prefilled.plan, parts, prefilled.dropped),
        lookup_ms=prefilled.lookup_ms,
        load_ms=prefilled.load_ms,
        repaired_tokens=len(prefilled.repaired),
        predicted_ms=expected_ms(prefilled.work, parts),
        full_ms=expected_ms(Work.of(num_tokens, num_tokens, 0), parts),
        actual_ms=1e3 * (first_token_at - prefilled.started_at),
        note=note,
        kv_cache_bits=parts.options.kv_cache_bits,
    )


def expected_ms(work: Work, parts: Parts) -> float | None:
    """Predicted time of some work; None before any was observed."""
    seconds = parts.cost.predict(work)
    return None if seconds is None else 1e3 * seconds


def describe(
    plan: ReusePlan, parts: Parts, dropped: tuple[Span, ...] = ()
) -> tuple[SpanReport, ...]:
    """The runs and gaps of a plan in the order of the prompt."""
    bits = parts.options.kv_cache_bits
    spans = [SpanReport(run.span, run.kind, _reason(run, bits)) for run in plan.runs]
    for span in plan.live:
        is_dropped = any(d.start < span.stop and span.start < d.stop for d in dropped)
        reason = "found, but computing it is faster" if is_dropped else ""
        spans.append(SpanReport(span, MatchKind.MISS, reason))
    return tuple(sorted(spans, key=lambda each: each.span.start))


def _reason(run: Run, bits: int) -> str:
    if run.kind is MatchKind.EXACT:
        return f"from {bits}-bit K/V: approximate" if bits < EXACT_BITS else ""
    if run.delta == 0:
        return "same position, different text before it"
    way = "later" if run.delta > 0 else "earlier"
    return f"{counted(abs(run.delta), 'token')} {way} than when it was computed"


def count(request: Request, prefilled: Prefilled | None, parts: Parts, *, looked_up: bool) -> None:
    """Count a finished request."""
    num_prompt, adapter = len(request.tokens), request.adapter.name
    add = partial(parts.metrics.add, tenant=request.tenant, adapter=adapter)
    add("requests")
    add("prompt_tokens", num_prompt)
    if prefilled is None or not looked_up:
        return
    plan = prefilled.plan
    for kind in (MatchKind.EXACT, MatchKind.MOVED):
        matches = [match for match in plan.matches if match.kind is kind]
        add(f"{kind.value}_hits", len(matches))
        add(f"{kind.value}_tokens", sum(len(match.span) for match in matches))
    add("repaired_tokens", len(prefilled.repaired))
    # The last token is computed in any case.
    add("misses", -(-(num_prompt - 1 - plan.num_reused) // parts.options.chunk_size))


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
    """By tenant: requests, hits, misses, and its part of memory's `size_bytes`."""
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
