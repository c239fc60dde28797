"""Warming: prefill of texts before a request needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tqdm.auto import tqdm

from kvboost.build import Parts
from kvboost.core import FrameKey
from kvboost.engine.prefill import Prefetched, Terms, keep, pin, prefetch, prefill
from kvboost.engine.results import WarmResult
from kvboost.engine.texts import check_ids
from kvboost.engine.worker import Worker
from kvboost.errors import ConfigError
from kvboost.models.adapters import Adapter

MANY_TEXTS = 8  # from here on progress is shown, on a terminal
FEW_TOKENS, MANY_TOKENS = 128, 1024  # per step, beside running requests or alone


class Warming:
    """Prefills texts one at a time, in steps between those of running requests."""

    def __init__(self, parts: Parts, worker: Worker, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether answers are running."""
        self._parts, self._worker, self._is_busy = parts, worker, is_busy
        # Each text has rows until it is stored, and the next one may be the same text.
        self._turn = threading.Lock()

    def warm_all(
        self,
        texts: Sequence[list[int]],
        before: list[int],
        *,
        tenant: str,
        adapter: Adapter,
        is_pinned: bool,
        ttl_s: float | None,
    ) -> WarmResult:
        """Compute and store each text after `before`, one by one; pin them if asked."""
        self._worker.check_caller()
        if ttl_s is not None and not is_pinned:
            raise ConfigError(f"ttl_s={ttl_s} requires pin=True")
        if not texts or not all(texts):
            raise ConfigError("nothing to warm: a text is empty")
        num_known = self._parts.model.num_embeddings
        check_ids(before, num_known, "the preface")
        for number, text in enumerate(texts):
            check_ids(text, num_known, f"text {number}")
        started, parts = time.perf_counter(), self._parts.under(adapter)
        num_computed, pinned = 0, set[FrameKey]()
        for text in tqdm(texts, desc="warming", disable=len(texts) < MANY_TEXTS or None):
            with self._turn:
                num_computed += self._warm(text, before, tenant, parts)
                if is_pinned:
                    pinning = partial(pin, before + text, parts, tenant=tenant, ttl_s=ttl_s)
                    pinned.update(self._worker.call(pinning))
        parts.metrics.add("warmed_tokens", num_computed, tenant=tenant)
        total_ms = 1e3 * (time.perf_counter() - started)
        return WarmResult(len(texts), sum(map(len, texts)), num_computed, len(pinned), total_ms)

    def _warm(self, text: list[int], before: list[int], tenant: str, parts: Parts) -> int:
        prefetched = prefetch(before + text, parts, Terms("exact", tenant))
        steps = warming(
            text, parts, before=before, tenant=tenant, at_once=self._at_once, prefetched=prefetched
        )
        num_computed = 0
        while (num_done := self._worker.call(partial(next, steps, None))) is not None:
            num_computed += num_done
        return num_computed

    def _at_once(self) -> int:
        return FEW_TOKENS if self._is_busy() else MANY_TOKENS


def warm_up(
    text: list[int], parts: Parts, *, before: list[int], tenant: str, is_wanted: bool = True
) -> None:
    """Compute and store what the store lacks of `text`, after `before`."""
    for _ in warming(text, parts, before=before, tenant=tenant, is_wanted=is_wanted):
        pass


def warming(
    text: list[int],
    parts: Parts,
    *,
    before: list[int],
    tenant: str,
    at_once: Callable[[], int] = lambda: MANY_TOKENS,
    prefetched: Prefetched | None = None,
    is_wanted: bool = True,
) -> Iterator[int]:
    """Compute and store what the store lacks of `text`, after `before`, in steps.

    With `is_wanted`, what is stored replaces chunks that are used more. A step computes as many
    tokens as `at_once` says. The last step yields how many tokens of the text were computed, the
    others 0.
    """
    model, tokens = parts.model, before + text
    if model.refusal or model.is_alone(len(tokens)):
        return
    started = time.perf_counter()
    prefilled = prefill(
        tokens, parts, Terms("exact", tenant), capacity=len(tokens), prefetched=prefetched
    )
    times, left = [time.perf_counter() - started], prefilled.pending
    while left:
        started = time.perf_counter()
        size = parts.piece_tokens or at_once()
        piece, left = left[:size], left[size:]
        model.forward(prefilled.rows, [tokens[position] for position in piece], piece)
        model.wait()
        times.append(time.perf_counter() - started)
        yield 0
    if len(times) == 2:  # in one piece, which is what the cost model predicts
        parts.cost.observe(prefilled.work, sum(times))
    size = parts.piece_tokens or 1
    whole = tokens[: len(tokens) // size * size]
    if whole:
        keep(prefilled, whole, parts, tenant=tenant, is_wanted=is_wanted)
    prefilled.rows.release()
    yield len(tokens) - max(len(before), prefilled.plan.num_reused)
