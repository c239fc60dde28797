"""Why a prompt would hit or miss, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvboost.build import Parts
from kvboost.core import TOKEN_BYTES, Chunk, ChunkKeys, MatchKind, Namespace, Span
from kvboost.engine.prefill import (
    Terms,
    dropped,
    look_up,
    named_chunks,
    repaired_rows,
    work_of,
    worthwhile,
)
from kvboost.engine.report import describe, expected_ms
from kvboost.engine.request import Request, reuse_refusal, terms_of
from kvboost.engine.results import ReuseReport, SpanReport
from kvboost.policy.cost import Work
from kvboost.reuse.lookup import LEAST_MOVED_TOKENS, LEAST_TOKENS
from kvboost.tiers.index import ChunkIndex


def explain(request: Request, parts: Parts, *, across_tenants: bool) -> ReuseReport:
    """What the store would supply for a request now, and why not more.

    `across_tenants` also says whether text is stored for somebody else, which is for operators.
    """
    tokens, parts = request.tokens, parts.under(request.adapter)
    refusal = reuse_refusal(request, parts.model, len(tokens))
    terms, note = terms_of(request, parts, is_refused=bool(refusal))
    found = look_up(tokens, parts, terms)
    wanted = worthwhile(found, parts, terms)
    ask = partial(
        _why_missed,
        tokens=tokens,
        named=named_chunks(tokens, parts, terms.tenant),
        parts=parts,
        terms=terms,
        across=across_tenants,
    )
    spans = describe(wanted, parts, dropped(found, wanted))
    return ReuseReport(
        spans=tuple(_with_reason(span, len(tokens), terms, ask) for span in spans),
        repaired_tokens=repaired_rows(wanted, parts, terms),
        predicted_ms=expected_ms(work_of(wanted, parts, terms), parts),
        full_ms=expected_ms(Work.of(len(tokens), len(tokens), 0), parts),
        note=refusal or note,
        kv_cache_bits=parts.options.kv_cache_bits,
    )


def _with_reason(
    report: SpanReport, num_tokens: int, terms: Terms, why_missed: Callable[[Span], str]
) -> SpanReport:
    if report.kind is not MatchKind.MISS or report.reason:
        return report
    if terms.reuse == "off":
        return replace(report, reason="reuse is off")
    if report.span == Span(num_tokens - 1, num_tokens):
        return replace(report, reason="the last token is always computed")
    return replace(report, reason=why_missed(report.span))


def _why_missed(
    span: Span,
    tokens: Sequence[int],
    named: tuple[list[Chunk], list[ChunkKeys], Namespace],
    parts: Parts,
    terms: Terms,
    *,
    across: bool,
) -> str:
    (chunks, keys, space), index = named, parts.store.index
    here = [
        i for i, c in enumerate(chunks) if c.span.start < span.stop and c.span.stop > span.start
    ]
    if any(parts.store.was_evicted(keys[i].prefix) for i in here):
        return "evicted"
    words = np.asarray(tokens[span.start : span.stop], dtype="<u4")
    others = [other for other in index.spaces() if other != space] if across else []
    if any(index.knows(words, other) for other in others):
        return "stored for another tenant, adapter, model or piece size"
    if terms.reuse == "exact" and index.knows(words, space):
        return "stored after different text: reuse='auto' would reuse it"
    if len(span) < (LEAST_MOVED_TOKENS if span.start else LEAST_TOKENS):
        return "new, or too short to look up"
    return _first_difference(span, tokens, chunks, keys, index) or "not seen before"


def _first_difference(
    span: Span,
    tokens: Sequence[int],
    chunks: Sequence[Chunk],
    keys: Sequence[ChunkKeys],
    index: ChunkIndex,
) -> str:
    """Where the nearest stored prompt differs."""
    for chunk, key in zip(chunks, keys, strict=True):
        if chunk.span.stop <= span.start:
            continue
        near, num_shared = index.nearest_child(key.parent, chunk.tokens)
        if near is None or num_shared == 0 or num_shared >= near.num_tokens:
            return ""
        stored = np.frombuffer(near.tokens, "<u4")[num_shared]
        position = chunk.span.start + num_shared
        if position >= len(tokens) or len(chunk.tokens) // TOKEN_BYTES <= num_shared:
            return ""
        return f"token {position} is {tokens[position]}; the nearest stored prompt has {stored}"
    return ""
