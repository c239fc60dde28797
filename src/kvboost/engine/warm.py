"""Reading texts before they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from tqdm.auto import tqdm

from kvboost.build import Parts
from kvboost.engine.prefill import Terms, bring, keep, pin, prefill
from kvboost.engine.results import WarmResult
from kvboost.engine.worker import Worker
from kvboost.errors import ConfigError
from kvboost.models.probe import context_sensitivity, reordered
from kvboost.models.slots import SlotCache

MANY_TEXTS = 8  # from here on progress is shown, on a terminal
PIECE_TOKENS = 128  # that running answers wait for


def warm_all(
    texts: Sequence[list[int]],
    before: list[int],
    parts: Parts,
    worker: Worker,
    *,
    tenant: str,
    is_pinned: bool,
    ttl_s: float | None,
) -> WarmResult:
    """Compute and store each text behind `before`, one after the other; pin them if asked."""
    if ttl_s is not None and not is_pinned:
        raise ConfigError(f"ttl_s={ttl_s} is how long a pin lasts: it needs pin=True")
    if not texts or not all(texts):
        raise ConfigError("there is nothing to warm: a text is empty")
    started = time.perf_counter()
    num_tokens = num_computed = num_pinned = 0
    for tokens in tqdm(texts, desc="warming", disable=len(texts) < MANY_TEXTS or None):
        bring(before + tokens, parts, Terms("exact", tenant))
        steps = warming(tokens, parts, before=before, tenant=tenant)
        while (num_done := worker.call(partial(next, steps, None))) is not None:
            num_computed += num_done
        num_tokens += len(tokens)
        if is_pinned:
            whole = before + tokens
            num_pinned += worker.call(partial(pin, whole, parts, tenant=tenant, ttl_s=ttl_s))
    parts.metrics.add("warmed_tokens", num_computed, tenant=tenant)
    total_ms = 1e3 * (time.perf_counter() - started)
    return WarmResult(len(texts), num_tokens, num_computed, num_pinned, total_ms)


def warm_up(text: list[int], parts: Parts, *, before: list[int], tenant: str) -> int:
    """Compute and store what the store lacks of `text` behind `before`; how many of it."""
    return sum(warming(text, parts, before=before, tenant=tenant))


def warming(text: list[int], parts: Parts, *, before: list[int], tenant: str) -> Iterator[int]:
    """Compute and store what the store lacks of `text` behind `before`.

    In steps, so that running answers have their turn in between; the last one gives how many
    tokens of the text were computed, the others 0.
    """
    model, tokens = parts.model, before + text
    if model.refusal or model.is_alone(len(tokens)):
        return
    started = time.perf_counter()
    prefilled = prefill(tokens, parts, Terms("exact", tenant), capacity=len(tokens))
    busy_s = time.perf_counter() - started
    for seconds in _computing(prefilled.slots, tokens, prefilled.pending, parts):
        busy_s += seconds
        yield 0
    parts.cost.observe(prefilled.work, busy_s)
    size = parts.piece_tokens or 1
    whole = tokens[: len(tokens) // size * size]
    if whole:
        known = b""
        if before and parts.options.recompute_strategy == "sensitivity":
            other = model.fresh_slots(len(whole))
            changed = reordered(whole, len(before))
            for _ in _computing(other, changed, range(len(whole)), parts):
                yield 0
            known = context_sensitivity(prefilled.slots, other, len(before))
        keep(prefilled, whole, parts, tenant=tenant, sensitivities=known)
    model.recycle(prefilled.slots)
    yield len(tokens) - max(len(before), prefilled.plan.num_reused)


def _computing(
    slots: SlotCache, tokens: Sequence[int], positions: Sequence[int], parts: Parts
) -> Iterator[float]:
    """Compute rows a piece at a time; how many seconds each took."""
    size = parts.piece_tokens or PIECE_TOKENS
    for first in range(0, len(positions), size):
        started = time.perf_counter()
        piece = positions[first : first + size]
        parts.model.forward(slots, [tokens[place] for place in piece], piece)
        yield time.perf_counter() - started
