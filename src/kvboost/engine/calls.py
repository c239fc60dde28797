"""From a call to its answer: the request, what is loaded for it, and its turn on the thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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

    def close(self) -> None:
        """End the threads that load."""
        self._loader.shutdown()

    def _submit(self, request: Request) -> Future[GenerationResult]:
        request = self.loading(request)
        return self._worker.submit(partial(answer, request, self._parts, self._tokenizer))
