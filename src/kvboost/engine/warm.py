"""Reading texts before they are needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from tqdm.auto import tqdm

from kvboost.build import Parts
from kvboost.engine.prefill import pin, warm_up
from kvboost.engine.results import WarmResult
from kvboost.engine.worker import Worker
from kvboost.errors import ConfigError

MANY_TEXTS = 8  # from here on progress is shown, on a terminal


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
        num_computed += worker.call(partial(warm_up, tokens, parts, before=before, tenant=tenant))
        num_tokens += len(tokens)
        if is_pinned:
            whole = before + tokens
            num_pinned += worker.call(partial(pin, whole, parts, tenant=tenant, ttl_s=ttl_s))
    parts.metrics.add("warmed_tokens", num_computed, tenant=tenant)
    total_ms = 1e3 * (time.perf_counter() - started)
    return WarmResult(len(texts), num_tokens, num_computed, num_pinned, total_ms)
