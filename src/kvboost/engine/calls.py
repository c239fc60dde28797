"""Requests from calls, and the loading of their K/V from tiers below memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvboost.build import Parts
from kvboost.core import ReuseMode
from kvboost.engine.contents import Contents
from kvboost.engine.prefill import Terms, prefetch
from kvboost.engine.request import DocumentOrder, Request, check_arguments, chosen_reuse
from kvboost.engine.results import GenerationMode
from kvboost.engine.texts import check_ids, tokens_of
from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.texts import Prompt

NUM_LOADERS = 4  # requests that load from tiers below memory at once


class Calls:
    """Makes requests and loads their K/V. Thread-safe."""

    def __init__(self, parts: Parts, tokenizer: PreTrainedTokenizerBase) -> None:
        self._parts, self._tokenizer = parts, tokenizer
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
        order: DocumentOrder = "given",
        **arguments: Any,
    ) -> Request:
        """The request of a call.

        Raises:
            ConfigError: it cannot be answered.
        """
        started_at = time.perf_counter()
        arrangement = Contents(self._parts, self._tokenizer).arrangement(order, tenant, adapter)
        tokens = tokens_of(prompt, self._tokenizer, documents, arrangement)
        check_ids(tokens, self._parts.model.num_embeddings, "the prompt")
        return Request(
            started_at=started_at,
            arguments=check_arguments(arguments, max_new_tokens, self._parts.model),
            tokens=tokens,
            reuse=chosen_reuse(mode, reuse, self._parts.options.reuse),
            tenant=tenant,
            adapter=self._parts.model.adapters.find(adapter),
            document_order=() if arrangement is None else arrangement.order,
        )

    def loading(self, request: Request) -> Request:
        """The same request, loading in the background from tiers below memory."""
        if not self._parts.store.tiers.is_deep or request.reuse == "off":
            return request
        parts, terms = self._parts.under(request.adapter), Terms(request.reuse, request.tenant)
        try:
            loading = self._loader.submit(prefetch, request.tokens, parts, terms)
        except RuntimeError:
            raise KVBoostError("the engine is closed") from None
        return replace(request, loading=loading)

    def loaded(self, request: Request) -> Request:
        """The same request, once it has loaded from tiers below memory."""
        request = self.loading(request)
        if request.loading is not None:
            wait([request.loading])
        return request

    def close(self) -> None:
        """End the threads that load."""
        self._loader.shutdown()
