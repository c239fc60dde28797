"""One request from tokens to answer: prefill with reuse, then Transformers' own generate()."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from kvboost.build import Parts
from kvboost.core import MatchKind, Span
from kvboost.engine.prefill import Prefilled, keep, prefill
from kvboost.engine.request import Request
from kvboost.engine.results import GenerationResult, ReuseReport, SpanReport
from kvboost.models.hf import HFModel, StepWatch, stopping_criteria
from kvboost.models.streaming import TextCallback

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase


def answer(
    request: Request, parts: Parts, tokenizer: PreTrainedTokenizerBase
) -> tuple[GenerationResult, Callable[[], None]]:
    """Generate, and return the result with the work of storing its K/V, to be done later."""
    if request.cancelled.is_set():
        raise CancelledError("cancelled while it waited")
    model = parts.model
    watch = StepWatch(request.cancelled.is_set)
    arguments = {"tokenizer": tokenizer, **request.arguments}  # the tokenizer is for stop strings
    arguments["stopping_criteria"] = stopping_criteria(watch, arguments.get("stopping_criteria"))
    if request.emit is not None:
        arguments["streamer"] = TextCallback(tokenizer, request.emit)
    num_prompt, num_new = len(request.tokens), _most_new_tokens(request, model)
    note = _why_not(request, model, num_prompt + num_new)
    prefilled = None
    if not model.refusal:
        prefilled = prefill(
            request.tokens,
            parts,
            reuse="off" if note else request.reuse,
            tenant=request.tenant,
            capacity=num_prompt + num_new,
        )
    output = model.generate(prefilled.slots if prefilled else None, request.tokens, arguments)
    sequences = output.sequences.tolist()
    texts = tokenizer.batch_decode([s[num_prompt:] for s in sequences], skip_special_tokens=True)
    finished_at = time.perf_counter()
    output.past_key_values = None  # its buffers serve the next request
    result = GenerationResult(
        output_text=texts[0],
        token_ids=sequences[0][num_prompt:],
        ttft_ms=1e3 * ((watch.first_token_at or finished_at) - request.started_at),
        total_ms=1e3 * (finished_at - request.started_at),
        prompt_tokens=num_prompt,
        cached_tokens=prefilled.plan.num_reused if prefilled else 0,
        reuse=_report(prefilled, num_prompt, note),
        output_texts=texts,
        output=output,
    )
    _count(prefilled, num_prompt, parts, looked_up=not note)

    def store() -> None:
        if prefilled is not None:
            if not note:
                _store(request, parts, prefilled, sequences[0])
            model.recycle(prefilled.slots)

    return result, store


def _most_new_tokens(request: Request, model: HFModel) -> int:
    limit = model.setting("max_new_tokens", request.arguments)
    if limit is not None:
        return int(limit)
    longest = model.setting("max_length", request.arguments) or 0
    return max(1, longest - len(request.tokens))


def _why_not(request: Request, model: HFModel, num_tokens: int) -> str:
    """Why this request must not touch the store, or an empty string."""
    if model.refusal:
        return model.refusal
    if request.reuse == "off":
        return "reuse is off"
    if model.is_alone(num_tokens):
        return (
            f"the rotary embedding changes beyond {model.position_limit} positions and "
            f"this request may reach {num_tokens}"
        )
    return ""


def _report(prefilled: Prefilled | None, num_prompt: int, note: str) -> ReuseReport:
    if prefilled is None:
        return ReuseReport((SpanReport(Span(0, num_prompt), MatchKind.MISS),), 0.0, 0.0, note)
    plan = prefilled.plan
    spans = [SpanReport(match.span, match.kind) for match in plan.matches]
    spans += [SpanReport(span, MatchKind.MISS) for span in plan.live]
    spans.sort(key=lambda report: report.span.start)
    return ReuseReport(tuple(spans), prefilled.lookup_ms, prefilled.load_ms, note)


def _store(request: Request, parts: Parts, prefilled: Prefilled, sequence: list[int]) -> None:
    tokens = _storable(request, parts, prefilled, sequence)
    if tokens:
        keep(prefilled.slots, tokens, parts, tenant=request.tenant)


def _storable(
    request: Request, parts: Parts, prefilled: Prefilled, sequence: list[int]
) -> list[int]:
    """The tokens whose rows are what any other request would compute for them."""
    slots = prefilled.slots
    if sequence[: len(request.tokens)] != request.tokens:
        return []  # a generation argument that changed the prompt
    if parts.piece_tokens is not None:
        # generate() may compute the last piece beside beams or candidates, in other shapes.
        return request.tokens[: prefilled.pending[0]]
    if slots.batch_size > 1:
        return request.tokens  # what was generated differs from beam to beam
    return sequence[: slots.length]


def _count(prefilled: Prefilled | None, num_prompt: int, parts: Parts, *, looked_up: bool) -> None:
    add = parts.metrics.add
    add("requests")
    add("prompt_tokens", num_prompt)
    if prefilled is not None and looked_up:
        plan = prefilled.plan
        add("exact_tokens", plan.num_reused)
        add("exact_hits", len(plan.matches))
        # The last token is computed in any case.
        add("misses", -(-(num_prompt - 1 - plan.num_reused) // parts.options.chunk_size))
