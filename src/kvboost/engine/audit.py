"""Audits: outputs on moved K/V compared with a full prefill, in idle time."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvboost.build import Parts
from kvboost.config import EXACT_BITS
from kvboost.engine.prefill import Prefetched, Prefilled, Terms, look_up, prefill
from kvboost.engine.request import Request
from kvboost.engine.verify import compare
from kvboost.models.rows import Rows

log = logging.getLogger(__name__)

MOST_AUDITED = 32  # tokens of an output
STEP_TOKENS = 64  # computed at once: a new request waits for no more


@dataclass(frozen=True)
class Audit:
    """A finished request, with all that its audit needs."""

    tokens: list[int]
    answer: list[int]
    logits: torch.Tensor  # of the answer, with reuse
    num_reused: int
    terms: Terms


def prepare_audit(
    request: Request, parts: Parts, prefilled: Prefilled, terms: Terms, answer: list[int]
) -> Audit | None:
    """The audit of a request that reused moved K/V, if the guardrail asks for one."""
    rows = prefilled.rows
    if rows.length < len(request.tokens) or not answer:
        return None
    if not parts.guard.wants_audit(parts.workload(request.tenant)):
        return None
    try:
        return prepare(rows, request.tokens, answer, parts, terms, prefilled.num_cached)
    except Exception:
        parts.guard.abandon(parts.workload(request.tenant))
        raise


def prepare(
    rows: Rows,
    tokens: list[int],
    answer: list[int],
    parts: Parts,
    terms: Terms,
    num_reused: int,
) -> Audit:
    """Compute the logits of an output again, while its K/V is still there.

    The last prompt token and the output run once more on the rows before them.
    """
    answer = answer[:MOST_AUDITED]
    first, stop, length = len(tokens) - 1, len(tokens) + len(answer) - 1, rows.length
    rows.crop(first)
    rest = (tokens + answer)[first:stop]
    logits = parts.model.forward(rows, rest, range(first, stop), num_logits=len(answer))
    rows.length = length
    return Audit(tokens, answer, logits.float(), num_reused, terms)


def carry_out(audit: Audit, parts: Parts, promotion: Iterator[None] | None) -> Iterator[None]:
    """Compute the same output with a full prefill, in steps, and tell the guardrail the distance.

    `promotion` stores the prompt exactly first. If it could not, the audit is skipped: only engines
    that cannot promote audit in memory outside of the pool.
    """
    workload = parts.workload(audit.terms.tenant)
    try:
        yield from promotion or ()
        rest = len(audit.tokens) - 1 - num_at_hand(audit.tokens, parts, audit.terms.tenant)
        is_at_hand = rest <= STEP_TOKENS
        has_room = parts.pool.room([]) >= 2 * STEP_TOKENS + len(audit.answer)
        if promotion is not None and not (is_at_hand and has_room):
            parts.guard.abandon(workload)
            return
        is_exact = parts.options.kv_cache_bits == EXACT_BITS
        logits = yield from _full_logits(audit, parts, continues=is_exact and is_at_hand)
    except Exception:
        parts.guard.abandon(workload)
        raise
    check = compare(logits, audit.logits, len(audit.tokens), audit.num_reused)
    log.info("audit: mean KL %.4f, top-1 %.2f", check.mean_kl, check.top1_ratio)
    parts.metrics.add("audits")
    parts.guard.record(workload, audit.terms.ratio, check.mean_kl, check.top1_ratio)


def _full_logits(
    audit: Audit, parts: Parts, *, continues: bool
) -> Generator[None, None, torch.Tensor]:
    """Logits of the output without moved K/V; yields after each step, and then holds no rows.

    `continues`: start from stored exact K/V.
    """
    everything, first = audit.tokens + audit.answer[:-1], len(audit.tokens) - 1
    tenant, num_rows = audit.terms.tenant, len(everything)
    if continues:
        at_hand, terms = Prefetched(parts.store.tiers.memory), Terms("exact", tenant)
        begun = prefill(everything[:first], parts, terms, capacity=num_rows, prefetched=at_hand)
        rest = range(begun.pending[0], num_rows)
        tokens, num_wanted = everything[rest.start :], len(audit.answer)
        computed = parts.model.forward(begun.rows, tokens, rest, num_logits=num_wanted)
        begun.rows.release()
        return computed.float()
    rows = parts.model.fresh_rows(num_rows)
    logits: list[torch.Tensor] = []
    for start in range(0, num_rows, STEP_TOKENS):
        step = range(start, min(start + STEP_TOKENS, num_rows))
        num_wanted = max(0, min(len(step), step.stop - first))
        tokens = everything[step.start : step.stop]
        computed = parts.model.forward(rows, tokens, step, num_logits=max(1, num_wanted))
        logits += [computed] if num_wanted else []
        yield
    return torch.cat(logits).float()


def num_at_hand(tokens: Sequence[int], parts: Parts, tenant: str) -> int:
    """Length of the prefix whose exact K/V is in memory."""
    num, memory = 0, parts.store.tiers.memory
    for match in look_up(tokens, parts, Terms("exact", tenant)).matches:
        if not memory.holds(match.key):
            break
        num = match.span.stop
    return num
