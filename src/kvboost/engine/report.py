"""What became of each span of a prompt, and why."""

from __future__ import annotations

from kvboost.build import Parts
from kvboost.core import Match, MatchKind, ReusePlan, Span
from kvboost.engine.prefill import Prefilled
from kvboost.engine.results import ReuseReport, SpanReport
from kvboost.policy.cost import Work


def report(
    prefilled: Prefilled | None, num_tokens: int, parts: Parts, note: str, first_token_at: float
) -> ReuseReport:
    """The report of a request that ran."""
    if prefilled is None:
        return ReuseReport(spans=describe(ReusePlan(num_tokens)), note=note)
    predicted = parts.cost.predict(prefilled.work)
    full = parts.cost.predict(Work.of(num_tokens, num_tokens, 0))
    return ReuseReport(
        spans=describe(prefilled.plan, prefilled.dropped),
        lookup_ms=prefilled.lookup_ms,
        load_ms=prefilled.load_ms,
        repaired_tokens=len(prefilled.repaired),
        predicted_ms=None if predicted is None else 1e3 * predicted,
        full_ms=None if full is None else 1e3 * full,
        actual_ms=1e3 * (first_token_at - prefilled.started_at),
        note=note,
    )


def describe(plan: ReusePlan, dropped: tuple[Span, ...] = ()) -> tuple[SpanReport, ...]:
    """The spans of a plan in the order of the prompt, neighbours of one run joined."""
    spans: list[SpanReport] = []
    for match in plan.matches:
        if match.follows and spans and spans[-1].span.stop == match.span.start:
            joined = Span(spans[-1].span.start, match.span.stop)
            spans[-1] = SpanReport(joined, match.kind, spans[-1].reason)
        else:
            spans.append(SpanReport(match.span, match.kind, _reason(match)))
    for span in plan.live:
        is_dropped = any(d.start < span.stop and span.start < d.stop for d in dropped)
        reason = "found, but computing it is faster" if is_dropped else ""
        spans.append(SpanReport(span, MatchKind.MISS, reason))
    return tuple(sorted(spans, key=lambda each: each.span.start))


def _reason(match: Match) -> str:
    if match.kind is MatchKind.EXACT:
        return ""
    if match.delta == 0:
        return "same place, other text before it"
    way = "later" if match.delta > 0 else "earlier"
    return f"{abs(match.delta)} tokens {way} than when it was computed"
