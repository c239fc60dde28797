"""The entrance of the batch: queues requests from any thread, within its capacity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvboost.build import Parts
from kvboost.core import Sampling
from kvboost.engine.batch.batch import Batch
from kvboost.engine.batch.member import Guest, Listener, Member
from kvboost.engine.batch.queue import Capacity
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.guest import (
    GuestGeneration,
    has_other_work,
    most_new_rows,
    sampling_of,
)
from kvboost.engine.request import Request
from kvboost.engine.results import Completion, Delta, GenerationResult
from kvboost.engine.score import ScoreResult, Scoring
from kvboost.engine.stream import Event
from kvboost.engine.worker import CallerThread, Worker
from kvboost.errors import ConfigError, QueueFull, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BatchFront:
    """Queues requests and waits for their outputs. Thread-safe."""

    def __init__(
        self,
        parts: Parts,
        tokenizer: PreTrainedTokenizerBase,
        worker: Worker | CallerThread,
        start_loading: Callable[[Request], Request] = lambda request: request,
    ) -> None:
        self._parts, self._tokenizer, self._worker = parts, tokenizer, worker
        self._start_loading = start_loading
        self._batch = Batch(parts, worker.add_idle)
        worker.run_steadily(self._batch.step)
        options = parts.options
        capacity = options.max_batch_size + options.max_queue_size
        self._capacity = Capacity(capacity, num_extra=options.max_queue_size)

    def enqueue(
        self,
        request: Request,
        sampling: Sampling,
        *,
        waits: bool = False,
        listener: Listener | None = None,
        deadline_s: float | None = None,
        guest: Guest | None = None,
    ) -> Ticket:
        """Queue a request; with `waits`, wait while the queue is full.

        A `guest` computes its output instead of the batch.

        Raises:
            QueueFull: the queue has no room for this tenant.
            ConfigError: the prompt and its answer do not fit, or `logit_bias` has unknown tokens.
        """
        if self._parts.model.refusal:
            raise UnsupportedModel(self._parts.model.refusal)
        if guest is None:
            self._check(request, sampling)
        self._worker.check_caller()
        if not self._capacity.acquire(request.tenant, waits=waits):
            raise QueueFull(f"{self._parts.options.max_queue_size} requests are waiting already")
        try:
            member = Member(
                request=self._start_loading(request),
                parts=self._parts.under(request.adapter),
                sampling=sampling,
                tokenizer=self._tokenizer,
                end_tokens=self._parts.model.end_tokens({}),
                release_capacity=partial(self._capacity.release, request.tenant),
                guest=guest,
                is_timed=guest is None or not has_other_work(request, self._parts.model),
                listener=listener,
                deadline_at=None if deadline_s is None else request.started_at + deadline_s,
            )
            self._worker.post(partial(self._batch.add, member))
        except BaseException:
            self._capacity.release(request.tenant)
            raise
        return member.ticket

    def _check(self, request: Request, sampling: Sampling) -> None:
        """Refuse what would fail in the middle of a step, where others would fail with it."""
        most, num_known = self._parts.working_tokens, self._parts.model.num_embeddings
        if not self._fits(request, sampling):
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens with {sampling.max_new_tokens} new ones "
                f"does not fit into {most} tokens of working memory (num_blocks, max_cache_bytes)"
            )
        for token in sampling.logit_bias:
            if not 0 <= token < num_known:
                raise ConfigError(
                    f"logit_bias: token {token} is unknown: expected 0 to {num_known - 1}"
                )

    def _fits(self, request: Request, sampling: Sampling) -> bool:
        return len(request.tokens) + sampling.max_new_tokens <= self._parts.working_tokens

    def run(self, request: Request) -> GenerationResult:
        """Wait for the output of a request."""
        with _cancelled_on_error([request]):
            return self._ask(request).result()

    def run_all(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Wait for the outputs of requests, in their order; each samples with a seed of its own."""
        with _cancelled_on_error(requests):
            replies = [self._ask(request, has_own_seed=True) for request in requests]
            return [reply.result() for reply in replies]

    def start(
        self, request: Request, put: Callable[[Event], None], cancelled: threading.Event
    ) -> None:
        """Start a request; `put` gets its text as it comes, and at last the result or an error."""
        reply = self._ask(replace(request, cancelled=cancelled), put)
        reply.add_done_callback(lambda done: put(done.exception() or done.result()))

    def score(self, request: Request, continuations: Sequence[list[int]]) -> ScoreResult:
        """Wait for log probabilities of continuations.

        Raises:
            UnsupportedModel: the model runs without reuse.
        """
        scoring = Scoring(continuations)
        sampling = Sampling(max_new_tokens=scoring.longest)
        with _cancelled_on_error([request]):
            ticket = self.enqueue(request, sampling, waits=True, guest=scoring)
            completion = ticket.result()
        return ScoreResult(
            scores=scoring.scores,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            reuse=completion.reuse,
            total_ms=1e3 * (time.perf_counter() - request.started_at),
        )

    def _ask(
        self,
        request: Request,
        put: Callable[[str], None] | None = None,
        *,
        has_own_seed: bool = False,
    ) -> Future[GenerationResult]:
        """Compute an output in the batch, or with Transformers if the batch cannot.

        Without `has_own_seed`, sampling draws from torch's random state, as Transformers does.
        """
        model, guest = self._parts.model, None
        if model.refusal:
            guest = GuestGeneration(request, self._tokenizer, put)
            return self._worker.start(partial(guest.alone, self._parts))
        sampling = sampling_of(request.arguments, model)
        if sampling is not None and sampling.temperature > 0 and not has_own_seed:
            sampling = None
        if sampling is None or not self._fits(request, sampling):
            guest = GuestGeneration(request, self._tokenizer, put)
            sampling = Sampling(max_new_tokens=most_new_rows(request, model))
        listener = partial(_pass_text, put) if put is not None and guest is None else None
        ticket = self.enqueue(request, sampling, waits=True, listener=listener, guest=guest)
        reply: Future[GenerationResult] = Future()
        ticket.future.add_done_callback(partial(_pass_on, reply, request, guest))
        return reply

    def is_busy(self) -> bool:
        """Whether answers are running."""
        return self._batch.is_busy

    def stats(self) -> dict[str, Any]:
        """Sizes now, and counts since the engine was made."""
        return self._batch.stats()


@contextmanager
def _cancelled_on_error(requests: Sequence[Request]) -> Iterator[None]:
    """Cancel requests whose caller is gone, as after a KeyboardInterrupt."""
    try:
        yield
    except BaseException:
        for request in requests:
            request.cancelled.set()
        raise


def _pass_text(put: Callable[[str], None], delta: Delta) -> None:
    if delta.text:
        put(delta.text)


def _pass_on(
    reply: Future[GenerationResult],
    request: Request,
    guest: GuestGeneration | None,
    done: Future[Completion],
) -> None:
    error = done.exception()
    if error is None:
        reply.set_result(_result_of(request, done.result(), guest))
    else:
        reply.set_exception(error)


def _result_of(
    request: Request, completion: Completion, guest: GuestGeneration | None
) -> GenerationResult:
    """The result of `generate` from a completion of the batch."""
    times, phases = completion.token_times, completion.phases
    tokenize_s = request.ready_at - request.started_at
    return GenerationResult(
        output_text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason,
        ttft_ms=1e3 * times[0],
        total_ms=1e3 * times[-1],
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        reuse=completion.reuse,
        output_texts=[completion.text] if guest is None else guest.texts,
        output=None if guest is None else guest.output,
        stages_ms={
            "tokenize": 1e3 * tokenize_s,
            "wait": 1e3 * (phases.queue - tokenize_s),
            "lookup": 1e3 * phases.lookup,
            "load": 1e3 * phases.load,
            "forward": 1e3 * phases.prefill,
            "decode": 1e3 * phases.decode,
        },
        document_order=request.document_order,
    )
