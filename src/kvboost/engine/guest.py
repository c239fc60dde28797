"""Transformers' own `generate()` as a guest of the batch: beams, processors, sampling (ADR 40).

It runs in a greenlet on the rows of a prompt, and returns to the batch after each token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent, greenlet

from kvboost.build import Parts
from kvboost.core import FinishReason, Sampling, Span
from kvboost.engine.report import count, report
from kvboost.engine.request import Request
from kvboost.engine.results import GenerationResult, finish_reason
from kvboost.engine.stream import TextReader
from kvboost.errors import ConfigError
from kvboost.models.hf import HFModel, StepWatch, stopping_criteria
from kvboost.models.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.batch.member import Member

# Arguments that the batch applies as Transformers does.
APPLIED = (
    "do_sample",
    "max_new_tokens",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
DEFAULT_TOP_K = 50  # of Transformers, when it samples


class GuestGeneration:
    """One call of `generate()`; afterwards `output` and `texts`."""

    def __init__(
        self,
        request: Request,
        tokenizer: PreTrainedTokenizerBase,
        emit: Callable[[str], None] | None = None,
    ) -> None:
        """`emit` gets the text as it comes."""
        self._request, self._tokenizer, self._emit = request, tokenizer, emit
        self.output: Any = None
        self.texts: list[str] = []

    def steps(self, member: Member) -> Generator[None, None, None]:
        """Generate on the rows of a prompt; stops after each token."""
        model, rows, batch = member.parts.model, member.rows, getcurrent()
        pending, corrected = member.take(len(member.pending))
        watch = StepWatch(batch.switch)
        call = greenlet(partial(self._call, model, watch, rows, pending, corrected), batch)
        try:
            while True:
                with torch.no_grad():  # calls restore the previous state, in any order
                    model.adapters.use(model.adapter)
                    sequences = call.switch()
                if call.dead:
                    break
                yield
        finally:
            if not call.dead:
                call.throw()
        tokens = self._request.tokens
        if sequences[0][: len(tokens)] != tokens:  # an argument that changed the prompt
            rows.crop(pending[0])
        member.output, member.text = sequences[0][len(tokens) :], self.texts[0]
        member.finish_reason = self._finish_reason(member.output, model)

    def alone(self, parts: Parts) -> GenerationResult:
        """Generate at once, for a model that runs without reuse."""
        request = self._request
        times: list[float] = []

        def note_token() -> None:
            times.append(time.perf_counter())
            if request.cancelled.is_set():
                raise CancelledError("cancelled by its caller")

        watch = StepWatch(note_token)
        begun_at = time.perf_counter()
        sequences = self._call(parts.under(request.adapter).model, watch)
        output = sequences[0][len(request.tokens) :]
        first_at, last_at = times[0], time.perf_counter()
        count(request, None, parts, looked_up=False)
        return GenerationResult(
            output_text=self.texts[0],
            token_ids=output,
            finish_reason=self._finish_reason(output, parts.model),
            ttft_ms=1e3 * (first_at - request.started_at),
            total_ms=1e3 * (last_at - request.started_at),
            prompt_tokens=len(request.tokens),
            cached_tokens=0,
            reuse=report(None, len(request.tokens), parts, parts.model.refusal, first_at),
            output_texts=self.texts,
            output=self.output,
            stages_ms={
                "tokenize": 1e3 * (request.ready_at - request.started_at),
                "wait": 1e3 * (begun_at - request.ready_at),
                "forward": 1e3 * (first_at - begun_at),
                "decode": 1e3 * (last_at - first_at),
            },
            document_order=request.document_order,
        )

    def _call(
        self,
        model: HFModel,
        watch: StepWatch,
        rows: Rows | None = None,
        pending: Sequence[int] = (),
        corrected: Iterable[Span] = (),
    ) -> list[list[int]]:
        request, tokenizer = self._request, self._tokenizer
        # The tokenizer is for stop strings.
        arguments = {"tokenizer": tokenizer, **request.arguments}
        others = arguments.get("stopping_criteria")
        arguments["stopping_criteria"] = stopping_criteria(watch, others)
        if self._emit is not None:
            arguments["streamer"] = _Streamer(tokenizer, self._emit)
        self.output = model.generate(rows, request.tokens, arguments, pending, corrected)
        self.output.past_key_values = None  # rows go back to the pool
        sequences: list[list[int]] = self.output.sequences.tolist()
        outputs = [sequence[len(request.tokens) :] for sequence in sequences]
        self.texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return sequences

    def _finish_reason(self, output: list[int], model: HFModel) -> FinishReason:
        """Derived from tokens and text: Transformers does not say why it stopped."""
        arguments = self._request.arguments
        stops = model.setting("stop_strings", arguments) or ()
        is_stopped = not model.end_tokens(arguments).isdisjoint(output) or any(
            stop in self.texts[0] for stop in ([stops] if isinstance(stops, str) else stops)
        )
        limit = most_new_tokens(self._request, model)
        return finish_reason(len(output), limit, is_stopped=is_stopped) or "stop"


class _Streamer:
    """Passes the text of chosen tokens on; what Transformers calls a streamer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, emit: Callable[[str], None]) -> None:
        self._reader, self._emit = TextReader(tokenizer, ()), emit
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        """Called with the prompt [sequences, tokens] first, then with new tokens."""
        if not self._is_prompt:
            self._pass_on("".join(map(self._reader.feed, tokens.flatten().tolist())))
        elif len(tokens) > 1:
            raise ConfigError("several sequences cannot be streamed")
        self._is_prompt = False

    def end(self) -> None:
        """Called after the last token."""
        self._pass_on(self._reader.finish())

    def _pass_on(self, text: str) -> None:
        if text:
            self._emit(text)


def sampling_of(arguments: Mapping[str, Any], model: HFModel) -> Sampling | None:
    """The batch's sampling equivalent to these arguments; None if there is none."""
    if set(arguments) - set(APPLIED) or model.special_settings() - set(APPLIED):
        return None
    values = {name: model.setting(name, dict(arguments)) for name in APPLIED}
    if values["max_new_tokens"] is None:
        return None
    common = Sampling(
        max_new_tokens=values["max_new_tokens"],
        repetition_penalty=values["repetition_penalty"] or 1.0,
    )
    if not values["do_sample"]:
        return common
    top_k = DEFAULT_TOP_K if values["top_k"] is None else values["top_k"]
    return replace(
        common,
        temperature=1.0 if values["temperature"] is None else values["temperature"],
        top_k=top_k,
        top_p=1.0 if values["top_p"] is None else values["top_p"],
        min_p=values["min_p"] or 0.0,
    )


def most_new_tokens(request: Request, model: HFModel) -> int:
    """The most tokens that `generate()` adds to a prompt."""
    limit = model.setting("max_new_tokens", request.arguments)
    if limit is not None:
        return int(limit)
    longest = model.setting("max_length", request.arguments) or 0
    return max(1, longest - len(request.tokens))


def most_new_rows(request: Request, model: HFModel) -> int:
    """The most rows that `generate()` fills after a prompt."""
    # Prompt lookup may try candidates beyond the limit.
    num_candidates = model.setting("prompt_lookup_num_tokens", request.arguments) or 0
    return most_new_tokens(request, model) + int(num_candidates)


def has_other_work(request: Request, model: HFModel) -> bool:
    """Whether beams or an assistant compute more than a prefill before the first token."""
    is_assisted = any(
        name in request.arguments for name in ("assistant_model", "prompt_lookup_num_tokens")
    )
    counts = (model.setting(n, request.arguments) for n in ("num_beams", "num_return_sequences"))
    return is_assisted or any((count or 1) > 1 for count in counts)
