"""One request from tokens to answer: prefill with reuse, then Transformers' own generate()."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from kvboost.build import Parts
from kvboost.core import FinishReason
from kvboost.engine.audit import carry_out, prepare_audit
from kvboost.engine.prefill import Prefilled, Terms, keep, prefill
from kvboost.engine.report import count, report
from kvboost.engine.request import Request
from kvboost.engine.results import GenerationResult, finish_reason
from kvboost.models.hf import HFModel, StepWatch, stopping_criteria
from kvboost.models.streaming import TextCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.worker import Idle, Later


def answer(
    request: Request, parts: Parts, tokenizer: PreTrainedTokenizerBase
) -> tuple[GenerationResult, Later]:
    """Generate, and return the result with the work of storing its K/V, to be done later."""
    begun_at = time.perf_counter()
    if request.cancelled.is_set():
        raise CancelledError("cancelled while waiting")
    parts = parts.under(request.adapter)
    model = parts.model
    watch = StepWatch(request.cancelled.is_set)
    arguments = {"tokenizer": tokenizer, **request.arguments}  # the tokenizer is for stop strings
    arguments["stopping_criteria"] = stopping_criteria(watch, arguments.get("stopping_criteria"))
    if request.emit is not None:
        arguments["streamer"] = TextCallback(tokenizer, request.emit)
    num_prompt, num_new = len(request.tokens), _most_new_tokens(request, model)
    note = why_not(request, model, num_prompt + num_new)
    terms, guard_note = terms_of(request, parts, is_refused=bool(note))
    prefilled = None
    if not model.refusal:
        capacity, brought = num_prompt + num_new, request.brought
        prefilled = prefill(request.tokens, parts, terms, capacity=capacity, brought=brought)
    if prefilled is None:
        output = model.generate(None, request.tokens, arguments)
    else:
        pending, corrected = prefilled.pending, prefilled.corrected
        output = model.generate(prefilled.rows, request.tokens, arguments, pending, corrected)
    sequences = output.sequences.tolist()
    texts = tokenizer.batch_decode([s[num_prompt:] for s in sequences], skip_special_tokens=True)
    finished_at = time.perf_counter()
    first_token_at = watch.first_token_at or finished_at
    output.past_key_values = None  # rows go back to the pool
    result = GenerationResult(
        output_text=texts[0],
        token_ids=sequences[0][num_prompt:],
        finish_reason=_finish_reason(sequences[0][num_prompt:], texts[0], num_new, request, model),
        ttft_ms=1e3 * (first_token_at - request.started_at),
        total_ms=1e3 * (finished_at - request.started_at),
        prompt_tokens=num_prompt,
        cached_tokens=prefilled.num_cached if prefilled else 0,
        reuse=report(prefilled, num_prompt, parts, note or guard_note, first_token_at),
        output_texts=texts,
        output=output,
        stages_ms=_stages_ms(request, begun_at, prefilled, first_token_at, finished_at),
    )
    count(request, prefilled, parts, looked_up=not note)

    def later() -> Idle | None:
        if prefilled is None:
            return None
        if len(sequences) == 1 and not _has_other_work(request, model):
            parts.cost.observe(prefilled.work, first_token_at - prefilled.started_at)
        audit = None
        if not note:
            # Before storing: it runs rows again, which are not to be written once stored.
            audit = prepare_audit(request, parts, prefilled, terms, result.token_ids)
            _store(request, parts, prefilled, sequences[0])
        prefilled.rows.release()
        return None if audit is None else carry_out(audit, parts)

    return result, later


def terms_of(request: Request, parts: Parts, *, is_refused: bool) -> tuple[Terms, str]:
    """What the request may reuse, and what the quality budget has to say about it."""
    if is_refused:
        return Terms("off", request.tenant), ""
    if request.reuse != "auto":
        return Terms(request.reuse, request.tenant), ""
    if not parts.model.rotations:
        return Terms("exact", request.tenant), parts.model.rotation_refusal
    allowed = parts.guard.terms(parts.workload(request.tenant))
    if not allowed.allows_moved:
        return Terms("exact", request.tenant), allowed.note
    return Terms("auto", request.tenant, allowed.ratio), allowed.note


def _finish_reason(
    output: list[int], text: str, limit: int, request: Request, model: HFModel
) -> FinishReason:
    """By the tokens and the text: Transformers does not say why it stopped."""
    stops = model.setting("stop_strings", request.arguments) or ()
    is_stopped = not model.end_tokens(request.arguments).isdisjoint(output) or any(
        stop in text for stop in ([stops] if isinstance(stops, str) else stops)
    )
    return finish_reason(len(output), limit, is_stopped=is_stopped) or "stop"


def _stages_ms(
    request: Request,
    begun_at: float,
    prefilled: Prefilled | None,
    first_token_at: float,
    finished_at: float,
) -> dict[str, float]:
    """Where the time of a call went; each stage ends where the next one begins."""
    ends = {"tokenize": request.ready_at, "wait": begun_at}
    if prefilled is not None:
        ends["lookup"] = prefilled.started_at + prefilled.lookup_ms / 1e3
        ends |= {"load": prefilled.placed_at, "select": prefilled.selected_at}
    ends |= {"forward": first_token_at, "decode": finished_at}
    starts = [request.started_at, *ends.values()]
    return {
        name: 1e3 * (end - start) for (name, end), start in zip(ends.items(), starts, strict=False)
    }


def _has_other_work(request: Request, model: HFModel) -> bool:
    """Whether beams or an assistant compute more than a prefill before the first token."""
    is_assisted = any(
        name in request.arguments for name in ("assistant_model", "prompt_lookup_num_tokens")
    )
    return is_assisted or (model.setting("num_beams", request.arguments) or 1) > 1


def _most_new_tokens(request: Request, model: HFModel) -> int:
    limit = model.setting("max_new_tokens", request.arguments)
    if limit is not None:
        return int(limit)
    longest = model.setting("max_length", request.arguments) or 0
    return max(1, longest - len(request.tokens))


def why_not(request: Request, model: HFModel, num_tokens: int) -> str:
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


def _store(request: Request, parts: Parts, prefilled: Prefilled, sequence: list[int]) -> None:
    tokens = _storable(request, parts, prefilled, sequence)
    if tokens:
        keep(prefilled, tokens, parts, tenant=request.tenant)


def _storable(
    request: Request, parts: Parts, prefilled: Prefilled, sequence: list[int]
) -> list[int]:
    """The tokens whose rows are what any other request would compute for them."""
    if sequence[: len(request.tokens)] != request.tokens:
        return []  # a generation argument that changed the prompt
    if parts.piece_tokens is not None:
        # generate() may compute the last piece beside beams or candidates, in other shapes.
        return request.tokens[: prefilled.pending[0]]
    return sequence[: prefilled.rows.length]  # nothing of what differs from beam to beam
