"""Audits: an answer on moved K/V against full prefill, in idle time."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from kvboost.build import Parts
from kvboost.engine.prefill import Prefilled, Terms
from kvboost.engine.request import Request
from kvboost.engine.verify import compare
from kvboost.models.rows import Rows

log = logging.getLogger(__name__)

MOST_AUDITED = 32  # tokens of an answer
STEP_TOKENS = 64  # computed at once: a request that comes meanwhile waits for no more


@dataclass(frozen=True)
class Audit:
    """What is needed to judge one answer later."""

    tokens: list[int]
    answer: list[int]
    logits: torch.Tensor  # from which the answer was chosen, with reuse
    num_reused: int
    terms: Terms


def prepare_audit(
    request: Request, parts: Parts, prefilled: Prefilled, terms: Terms, answer: list[int]
) -> Audit | None:
    """What an audit of this answer needs, if it is one that the quality budget wants audited."""
    rows = prefilled.rows
    if rows.exact_stop >= len(request.tokens) or rows.length < len(request.tokens) or not answer:
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
    """Read off the logits of an answer while its K/V is still there.

    The last prompt token and the answer are run once more on the rows before them.
    """
    answer = answer[:MOST_AUDITED]
    first, stop, length = len(tokens) - 1, len(tokens) + len(answer) - 1, rows.length
    rows.crop(first)
    rest = (tokens + answer)[first:stop]
    logits = parts.model.forward(rows, rest, range(first, stop), num_logits=len(answer))
    rows.length = length
    return Audit(tokens, answer, logits.float(), num_reused, terms)


def carry_out(audit: Audit, parts: Parts) -> Iterator[None]:
    """Compute the same answer in full, step by step, and tell the guard how far it was away."""
    workload = parts.workload(audit.terms.tenant)
    try:
        logits = yield from _full_logits(audit, parts)
    except Exception:
        parts.guard.abandon(workload)
        raise
    check = compare(logits, audit.logits, len(audit.tokens), audit.num_reused)
    log.info("audit: mean KL %.4f, top-1 %.2f", check.mean_kl, check.top1_ratio)
    parts.metrics.add("audits")
    parts.guard.record(workload, audit.terms.ratio, check.mean_kl, check.top1_ratio)


def _full_logits(audit: Audit, parts: Parts) -> Generator[None, None, torch.Tensor]:
    """Logits of the answer by a full prefill; stops after each step."""
    model, everything = parts.model, audit.tokens + audit.answer[:-1]
    rows = model.fresh_rows(len(everything))
    logits: list[torch.Tensor] = []
    for start in range(0, len(everything), STEP_TOKENS):
        step = range(start, min(start + STEP_TOKENS, len(everything)))
        num_wanted = max(0, min(len(step), step.stop - (len(audit.tokens) - 1)))
        tokens = everything[step.start : step.stop]
        computed = model.forward(rows, tokens, step, num_logits=max(1, num_wanted))
        logits += [computed] if num_wanted else []
        yield
    return torch.cat(logits).float()
