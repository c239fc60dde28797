"""From a call to its answer: the request, what is loaded for it, and its turn on the thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kvboost.build import Parts
from kvboost.core import ReuseMode
from kvboost.engine.answer import answer
from kvboost.engine.prefill import Terms, bring
from kvboost.engine.request import Request, check_arguments, chosen_reuse
from kvboost.engine.results import GenerationMode, GenerationResult
from kvboost.engine.stream import Event
from kvboost.engine.texts import check_ids, tokens_of
from kvboost.engine.worker import Worker
from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.texts import Prompt
    from kvboost.engine.worker import Later

Work: TypeAlias = "Callable[[], tuple[GenerationResult, Later]]"

NUM_LOADERS = 4  # requests for which tiers below memory are asked at once


class Calls:
    """Makes requests, and has them answered one by one. Thread-safe."""

    def __init__(self, parts: Parts, tokenizer: PreTrainedTokenizerBase, worker: Worker) -> None:
        self._parts, self._tokenizer, self._worker = parts, tokenizer, worker
        self._loader = ThreadPoolExecutor(NUM_LOADERS, "kvboost-load")

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        documents: Sequence[str] = (),
        mode: GenerationMode | None = None,
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        **arguments: Any,
    ) -> Request:
        """The request of a call.

        Raises:
            ConfigError: it cannot be answered.
        """
        started_at = time.perf_counter()
        tokens = tokens_of(prompt, self._tokenizer, documents)
        check_ids(tokens, self._parts.model.num_embeddings, "the prompt")
        return Request(
            started_at=started_at,
            arguments=check_arguments(arguments, max_new_tokens),
            tokens=tokens,
            reuse=chosen_reuse(mode, reuse, self._parts.options.reuse),
            tenant=tenant,
            adapter=self._parts.model.adapters.find(adapter),
        )

    def start(
        self, request: Request, put: Callable[[Event], None], cancelled: threading.Event
    ) -> None:
        """Have a request answered; `put` gets the text as it comes, and the end."""
        reply = self._submit(request.streamed(put, cancelled))
        reply.add_done_callback(lambda done: put(done.exception() or done.result()))

    def run(self, request: Request) -> GenerationResult:
        """Wait for the answer of a request."""
        reply = self._submit(request)
        try:
            return reply.result()
        except BaseException:  # most of all KeyboardInterrupt: don't compute for nobody
            request.cancelled.set()
            raise

    def loading(self, request: Request) -> Request:
        """The same request; what tiers below memory have of it is on its way."""
        if not self._parts.store.tiers.is_deep or request.reuse == "off":
            return request
        parts, terms = self._parts.under(request.adapter), Terms(request.reuse, request.tenant)
        try:
            loading = self._loader.submit(bring, request.tokens, parts, terms)
        except RuntimeError:
            raise KVBoostError("the engine is closed") from None
        return replace(request, loading=loading)

    def loaded(self, request: Request) -> Request:
        """The same request, once what tiers below memory have of it is there."""
        request = self.loading(request)
        if request.loading is not None:
            wait([request.loading])
        return request

    def close(self) -> None:
        """End the threads that load."""
        self._loader.shutdown()

    def _submit(self, request: Request) -> Future[GenerationResult]:
        """Queue a request once its K/V was loaded: the engine's thread waits for no tier."""
        request = self.loading(request)
        work = partial(answer, request, self._parts, self._tokenizer)
        if request.loading is None:
            return self._worker.submit(work)
        reply: Future[GenerationResult] = Future()
        request.loading.add_done_callback(lambda _: self._queue(work, reply))
        return reply

    def _queue(self, work: Work, reply: Future[GenerationResult]) -> None:
        try:
            answered = self._worker.submit(work)
        except KVBoostError as error:
            reply.set_exception(error)
        else:
            answered.add_done_callback(partial(_pass_on, reply))


def _pass_on(reply: Future[GenerationResult], answered: Future[GenerationResult]) -> None:
    error = answered.exception()
    if error is None:
        reply.set_result(answered.result())
    else:
        reply.set_exception(error)
