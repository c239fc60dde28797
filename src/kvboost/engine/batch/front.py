"""Where requests enter the batch, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvboost.build import Parts
from kvboost.core import Sampling
from kvboost.engine.batch.batch import Batch
from kvboost.engine.batch.member import Listener, Member
from kvboost.engine.batch.queue import Places
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.request import Request
from kvboost.engine.results import Completion, GenerationResult
from kvboost.engine.worker import Worker
from kvboost.errors import ConfigError, QueueFull, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BatchFront:
    """Holds the places of the batch and its queue. Thread-safe."""

    def __init__(
        self,
        parts: Parts,
        tokenizer: PreTrainedTokenizerBase,
        worker: Worker,
        start_loading: Callable[[Request], Request],
    ) -> None:
        self._parts, self._tokenizer, self._worker = parts, tokenizer, worker
        self._start_loading = start_loading
        self._batch = Batch(parts, worker.add_idle)
        worker.run_steadily(self._batch.step)
        options = parts.options
        num_places = options.max_batch_size + options.max_queue_size
        self._places = Places(num_places, num_extra=options.max_queue_size)

    def enqueue(
        self,
        request: Request,
        sampling: Sampling,
        *,
        waits: bool = False,
        listener: Listener | None = None,
        deadline_s: float | None = None,
    ) -> Ticket:
        """Let a request join as soon as there is room; `waits` for a place in the queue if asked.

        Raises:
            QueueFull: there is no place for a request of this tenant.
            ConfigError: the prompt and its answer do not fit, or `logit_bias` has unknown tokens.
        """
        if self._parts.model.refusal:
            raise UnsupportedModel(self._parts.model.refusal)
        self._check(request, sampling)
        self._worker.check_caller()
        if not self._places.acquire(request.tenant, waits=waits):
            raise QueueFull(f"{self._parts.options.max_queue_size} requests are waiting already")
        try:
            member = Member(
                request=self._start_loading(request),
                parts=self._parts.under(request.adapter),
                sampling=sampling,
                tokenizer=self._tokenizer,
                end_tokens=self._parts.model.end_tokens({}),
                give_back_place=partial(self._places.release, request.tenant),
                listener=listener,
                deadline_at=None if deadline_s is None else request.started_at + deadline_s,
            )
            self._worker.post(partial(self._batch.add, member))
        except BaseException:
            self._places.release(request.tenant)
            raise
        return member.ticket

    def _check(self, request: Request, sampling: Sampling) -> None:
        """Refuse what would fail in the middle of a step, where others would fail with it."""
        most, num_known = self._parts.working_tokens, self._parts.model.num_embeddings
        if len(request.tokens) + sampling.max_new_tokens > most:
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens with {sampling.max_new_tokens} new ones "
                f"does not fit into {most} tokens of working memory (num_blocks, max_cache_bytes)"
            )
        for token in sampling.logit_bias:
            if not 0 <= token < num_known:
                raise ConfigError(
                    f"logit_bias: token {token} is unknown: expected 0 to {num_known - 1}"
                )

    def answer_all(
        self,
        requests: Sequence[Request],
        samplings: Sequence[Sampling | None],
        run_alone: Callable[[Request], GenerationResult],
    ) -> list[GenerationResult]:
        """The answers in order; a request without sampling runs alone, after the others began."""
        tickets: list[Ticket | None] = []
        try:
            for request, sampling in zip(requests, samplings, strict=True):
                ticket = None
                if sampling is not None and not self._parts.model.refusal:
                    ticket = self.enqueue(request, sampling, waits=True)
                tickets.append(ticket)
            return [
                run_alone(request) if ticket is None else _result_of(ticket.result())
                for request, ticket in zip(requests, tickets, strict=True)
            ]
        except BaseException:
            for ticket in tickets:
                if ticket is not None:
                    ticket.cancel()
            raise

    def is_busy(self) -> bool:
        """Whether answers are running."""
        return self._batch.is_busy

    def stats(self) -> dict[str, Any]:
        """Sizes now, and counts since the engine was made."""
        return self._batch.stats()


def _result_of(completion: Completion) -> GenerationResult:
    """An answer of the batch in the words of `generate`."""
    times, phases = completion.token_times, completion.phases
    return GenerationResult(
        output_text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason,
        ttft_ms=1e3 * times[0],
        total_ms=1e3 * times[-1],
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        reuse=completion.reuse,
        output_texts=[completion.text],
        output=None,
        stages_ms={
            "wait": 1e3 * phases.queue,
            "lookup": 1e3 * phases.lookup,
            "load": 1e3 * phases.load,
            "forward": 1e3 * phases.prefill,
            "decode": 1e3 * phases.decode,
        },
    )
