"""`KVBoost`: the engine that users call, from any thread."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from kvboost.build import build
from kvboost.config import OptionValues, certified_folder, check_reuse, make_options
from kvboost.core import ReuseMode, Sampling, StoreListener
from kvboost.engine.batch.front import BatchFront
from kvboost.engine.batch.member import Listener
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.calls import Calls
from kvboost.engine.contents import Contents
from kvboost.engine.explain import explain
from kvboost.engine.guest import sampling_of
from kvboost.engine.report import cache_stats
from kvboost.engine.request import DEFAULT_NEW_TOKENS, CallArguments, DocumentOrder, Request
from kvboost.engine.results import CorrectnessReport, GenerationResult, ReuseReport, WarmResult
from kvboost.engine.score import ScoreResult, continuation_tokens
from kvboost.engine.stream import TextStream, text_of
from kvboost.engine.texts import PREFACE, chat_tokens, texts_to_warm, tokens_of
from kvboost.engine.verify import prompts_to_verify, verify, verify_moved
from kvboost.engine.warm import Warming
from kvboost.engine.worker import Worker
from kvboost.errors import ConfigError, KVBoostError, UnsupportedModel
from kvboost.models.hf import HFModel
from kvboost.models.load import LoadArguments, boundary_tokens, load_or_tell

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Self, Unpack

    from kvboost.engine.texts import Messages, Prompt

FLUSH_S = 60.0  # for tiers below memory


class PretrainedArguments(OptionValues, LoadArguments, total=False):
    """Options of the engine and arguments of Transformers' `from_pretrained`."""


class KVBoost:
    """A Transformers model with a cache of the K/V it has computed.

    Calls may come from any thread; all requests run in one batch. As a context manager it closes
    itself.

    Example:
        The examples of the methods use this `engine`.

        >>> from kvboost import KVBoost
        >>> engine = KVBoost.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> first = engine.generate(manual + " Where is the pump?", max_new_tokens=4)
        >>> second = engine.generate(manual + " When?", max_new_tokens=4)
        >>> first.cached_tokens, second.cached_tokens, second.prompt_tokens
        (0, 88, 90)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        adapters: Mapping[str, str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        """Certify `model` and build an engine around it.

        Until `close`, the model runs with KVBoost's attention functions, also outside the engine.

        Args:
            model: A causal language model of Transformers.
            tokenizer: Its tokenizer.
            adapters: PEFT adapters by name, each a folder or a hub name.
            **options: Fields of `kvboost.config.Options`. Sizes are bytes, or texts such as "4GiB".

        Raises:
            UnsupportedModel: The model's K/V cannot be reused, and `strict` is True.
            ConfigError: An option is unknown or wrong, or an adapter does not fit the model.
        """
        self._options = make_options(options)
        self.tokenizer = tokenizer
        snapped = self._options.chunk_boundary_window > 0
        boundaries = boundary_tokens(tokenizer) if snapped else frozenset()
        self._worker = Worker()
        try:
            host = partial(
                HFModel,
                model,
                strict=self._options.strict,
                prepacked=self._options.prepack_weights,
                bitwise=self._options.deterministic,
                kept_in=certified_folder(),
            )
            hosted = self._worker.call(host)
        except KVBoostError:
            self._worker.close()
            raise
        try:
            for name, folder in (adapters or {}).items():
                self._worker.call(partial(hosted.load_adapter, name, folder))
            self._parts = build(self._options, hosted, boundaries)
        except BaseException:
            hosted.release()
            self._worker.close()
            raise
        self._worker.at_end(self._parts.store.tiers.close)
        self._calls = Calls(self._parts, tokenizer)
        self._front = BatchFront(self._parts, tokenizer, self._worker, self._calls.loading)
        self._warming = Warming(self._parts, self._worker, self._front.is_busy)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        device: str | None = None,
        adapters: Mapping[str, str] | None = None,
        max_weight_bytes: int | str | None = None,
        **arguments: Unpack[PretrainedArguments],
    ) -> Self:
        """Load a model with its tokenizer, and build an engine around it.

        Args:
            model: Hub name, folder or GGUF file.
            device: "cpu", "cuda", "cuda:1" ...; default: a GPU if there is one.
            adapters: PEFT adapters by name, each a folder or a hub name.
            max_weight_bytes: Most bytes of weights in memory at a time, for models larger than
                memory: an int, or a text such as "4GiB".
            **arguments: Options of the engine, and arguments of Transformers' `from_pretrained`
                (dtype, revision, gguf_file, quantization_config ...).

        Raises:
            UnsupportedModel: The model's K/V cannot be reused, and `strict` is True.
            ConfigError: The model cannot be found or loaded, an argument is unknown or wrong, or
                an adapter does not fit the model.
            OSError: A file of the model cannot be read.

        Example:
            >>> name = "HuggingFaceTB/SmolLM2-135M-Instruct"
            >>> with KVBoost.from_pretrained(name, dtype="float32", max_cache_bytes="1GiB") as big:
            ...     big.generate("The capital of France is", max_new_tokens=2).output_text
            ' Paris.'
        """
        host_names = LoadArguments.__optional_keys__
        own: Any = {name: value for name, value in arguments.items() if name not in host_names}
        make_options(own, also_known={*host_names, "adapters", "device", "max_weight_bytes"})
        host = {name: value for name, value in arguments.items() if name in host_names}
        loaded = load_or_tell(model, device, host, max_weight_bytes)
        return cls(*loaded, adapters=adapters, **own)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        **arguments: Unpack[CallArguments],
    ) -> GenerationResult:
        """Complete a prompt and wait for the whole output.

        Args:
            prompt: Text or token ids.
            max_new_tokens: Most tokens to generate; default: 64.
            documents: Texts inside the prompt that other prompts contain too. Each is tokenized
                on its own, so that it has the same tokens in every prompt.
            order: "any" lets the documents exchange their places, so that the prompt continues
                a stored one; `result.document_order` says how. Default: "given".
            reuse: "off", "exact" or "auto"; default: the engine's option.
            tenant: Whose cache to use. Tenants never hit each other's K/V.
            adapter: Name of a loaded adapter, "" for the base model; default: the model as loaded.
            mode: Another way to give `reuse`: a `GenerationMode`.
            do_sample: Whether to sample; default: False, or True with one of the next four.
            temperature: Above 0 samples, 0 is greedy.
            top_k: Sample from that many most likely tokens.
            top_p: Sample from the most likely tokens that together have this probability.
            min_p: Drop tokens below this share of the highest probability.
            **arguments: Any argument of Transformers' `generate()` except its cache.

        Raises:
            TypeError: The prompt is neither text nor token ids.
            ConfigError: The prompt is empty, or an argument cannot be used.
            KVBoostError: The engine is closed.

        Example:
            >>> page = 8 * " In winter the pump is kept in the cellar."
            >>> prompt = f"A manual:{page} Where is the pump?"
            >>> engine.generate(prompt, max_new_tokens=4, documents=[page]).cached_tokens
            0
            >>> engine.generate(prompt, max_new_tokens=4, documents=[page]).kv_reuse_ratio > 0.95
            True
            >>> engine.generate(prompt, max_new_tokens=4, tenant="somebody else").cached_tokens
            0
        """
        return self._front.run(self._calls.request(prompt, max_new_tokens, **arguments))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Unpack[CallArguments],
    ) -> list[GenerationResult]:
        """Complete several prompts in one batch and wait for all outputs.

        Text that prompts share is computed and held once.

        Args:
            prompts: Texts or lists of token ids.
            max_new_tokens: Most tokens to generate per prompt; default: 64.
            per_prompt: Arguments of single prompts, which override the common ones.
            **arguments: See `generate`.

        Returns:
            One result per prompt, in the same order.

        Raises:
            ConfigError: A prompt or argument cannot be used.

        Example:
            >>> prompts = ["The capital of France is", "The capital of Italy is"]
            >>> results = engine.generate_batch(prompts, max_new_tokens=2)
            >>> [result.output_text for result in results]
            [' Paris.', ' Rome.']
            >>> lengths = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
            >>> results = engine.generate_batch(prompts, per_prompt=lengths)
            >>> [len(result.token_ids) for result in results]
            [1, 2]
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts is one text: expected a list of prompts")
        own = per_prompt or [{}] * len(prompts)
        if len(own) != len(prompts):
            raise ConfigError(f"per_prompt has {len(own)} entries for {len(prompts)} prompts")
        common = {"max_new_tokens": max_new_tokens, **arguments}
        requests = [
            self._calls.request(prompt, **{**common, **each})
            for prompt, each in zip(prompts, own, strict=True)
        ]
        return self._front.run_all(requests)

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        documents: Sequence[str] = (),
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        deadline_s: float | None = None,
        listener: Listener | None = None,
    ) -> Ticket:
        """Add a prompt to the running batch and return at once.

        Args:
            prompt: Text or token ids.
            sampling: How to choose tokens; default: `default_sampling()`.
            documents: See `generate`.
            reuse: See `generate`.
            tenant: See `generate`.
            adapter: See `generate`.
            deadline_s: Seconds after which the request fails with `DeadlineExceeded`.
            listener: Called with each new piece of the output, on the engine's thread; must return
                quickly.

        Returns:
            A ticket: `result()` waits for the output, `cancel()` stops the request.

        Raises:
            QueueFull: Too many requests are waiting.
            ConfigError: The prompt with its output does not fit into the working memory.
            UnsupportedModel: The model runs without reuse (`strict=False`).

        Example:
            >>> from kvboost import Sampling
            >>> ticket = engine.submit("The capital of France is", Sampling(max_new_tokens=2))
            >>> completion = ticket.result()
            >>> completion.text, completion.finish_reason
            (' Paris.', 'length')
        """
        request = self._calls.request(
            prompt, documents=documents, reuse=reuse, tenant=tenant, adapter=adapter
        )
        chosen = sampling or self.default_sampling()
        return self._front.enqueue(request, chosen, listener=listener, deadline_s=deadline_s)

    def default_sampling(self) -> Sampling:
        """The sampling of the model's generation config; greedy if it has none.

        Example:
            >>> engine.default_sampling().max_new_tokens
            64
        """
        return sampling_of({"max_new_tokens": DEFAULT_NEW_TOKENS}, self._parts.model) or Sampling()

    def batch_stats(self) -> dict[str, Any]:
        """Running and waiting requests, and the K/V they use; returns at once.

        Example:
            >>> stats = engine.batch_stats()
            >>> stats["num_running"], stats["num_waiting"], stats["max_batch_size"]
            (0, 0, 16)
        """
        return self._front.stats()

    @property
    def busy_s(self) -> float:
        """Seconds since the engine's current step began, 0 when idle; for health checks.

        Example:
            >>> engine.busy_s < 60
            True
        """
        return self._worker.busy_s

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        **arguments: Unpack[CallArguments],
    ) -> TextStream:
        """Complete a prompt as `generate` does, and return the output as a stream of text.

        Args:
            prompt: Text or token ids.
            max_new_tokens: Most tokens to generate; default: 64.
            **arguments: See `generate`.

        Raises:
            TypeError: The prompt is neither text nor token ids.
            ConfigError: The prompt is empty, or an argument cannot be used.

        Example:
            >>> "".join(engine.stream("The capital of France is", max_new_tokens=2))
            ' Paris.'
        """
        request = self._calls.request(prompt, max_new_tokens, **arguments)
        return TextStream(partial(self._front.start, request))

    def astream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        **arguments: Unpack[CallArguments],
    ) -> AsyncIterator[str]:
        """Stream like `stream`, for asyncio.

        The event loop stays free while the model runs. Generation starts with the first iteration
        and stops when the loop is left.

        Args:
            prompt: Text or token ids.
            max_new_tokens: Most tokens to generate; default: 64.
            **arguments: See `generate`.

        Example:
            >>> import asyncio
            >>> async def answer(prompt: str) -> str:
            ...     return "".join([text async for text in engine.astream(prompt, 2)])
            >>> asyncio.run(answer("The capital of France is"))
            ' Paris.'
        """
        request = self._calls.request(prompt, max_new_tokens, **arguments)
        return text_of(partial(self._front.start, request))

    @overload
    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = None,
        *,
        stream: Literal[False] = False,
        tools: Any = None,
        **arguments: Unpack[CallArguments],
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = None,
        *,
        stream: Literal[True],
        tools: Any = None,
        **arguments: Unpack[CallArguments],
    ) -> TextStream: ...

    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = None,
        *,
        stream: bool = False,
        tools: Any = None,
        **arguments: Unpack[CallArguments],
    ) -> GenerationResult | TextStream:
        """Reply to a conversation, in the model's chat template.

        Earlier turns are reused as long as the template renders them unchanged and the tokenizer
        splits a reply into the tokens that the model generated.

        Args:
            messages: Dicts with "role" and "content", the last message at the end.
            max_new_tokens: Most tokens to generate; default: 64.
            stream: Return a `TextStream`, as `stream` does, instead of waiting for the whole reply.
            tools: Tool definitions for the template.
            **arguments: See `generate`.

        Example:
            >>> messages = [{"role": "user", "content": "What is the capital of France?"}]
            >>> reply = engine.chat(messages, max_new_tokens=16)
            >>> "Paris" in reply.output_text
            True
            >>> messages.append({"role": "assistant", "content": reply.output_text})
            >>> messages.append({"role": "user", "content": "And of Italy?"})
            >>> with engine.chat(messages, max_new_tokens=4, stream=True) as pieces:
            ...     text = "".join(pieces)
            >>> pieces.result.kv_reuse_ratio > 0.7
            True
        """
        request = self._chat_request(messages, max_new_tokens, tools, **arguments)
        if stream:
            return TextStream(partial(self._front.start, request))
        return self._front.run(request)

    def achat(
        self,
        messages: Messages,
        max_new_tokens: int | None = None,
        *,
        tools: Any = None,
        **arguments: Unpack[CallArguments],
    ) -> AsyncIterator[str]:
        """Stream a reply like `chat(..., stream=True)`, for asyncio; see `astream`.

        Args:
            messages: Dicts with "role" and "content", the last message at the end.
            max_new_tokens: Most tokens to generate; default: 64.
            tools: Tool definitions for the template.
            **arguments: See `generate`.

        Example:
            >>> import asyncio
            >>> async def reply(messages: list[dict[str, str]]) -> str:
            ...     return "".join([text async for text in engine.achat(messages, 16)])
            >>> question = {"role": "user", "content": "What is the capital of France?"}
            >>> "Paris" in asyncio.run(reply([question]))
            True
        """
        request = self._chat_request(messages, max_new_tokens, tools, **arguments)
        return text_of(partial(self._front.start, request))

    def _chat_request(
        self,
        messages: Messages,
        max_new_tokens: int | None,
        tools: Any,
        documents: Sequence[str] = (),
        order: DocumentOrder = "given",
        **arguments: Any,
    ) -> Request:
        started_at = time.perf_counter()
        whose = arguments.get("tenant", ""), arguments.get("adapter")
        arrangement = self.contents.arrangement(order, *whose)
        template = {"tools": tools, "add_generation_prompt": True}
        tokens = chat_tokens(messages, self.tokenizer, documents, arrangement, **template)
        request = self._calls.request(tokens, max_new_tokens, **arguments)
        document_order = () if arrangement is None else arrangement.order
        return replace(request, started_at=started_at, document_order=document_order)

    def warm(
        self,
        content: Prompt | Sequence[str] | Messages,
        position_offset: int = 0,
        *,
        anywhere: bool | None = None,
        preface: str | None = None,
        pin: bool = False,
        ttl_s: float | None = None,
        tenant: str = "",
        adapter: str | None = None,
    ) -> WarmResult:
        """Prefill and store text before a request needs it; waits until it is stored.

        Other requests keep running meanwhile.

        Args:
            content: A text, a list of texts, chat messages, or token ids.
            position_offset: Must be 0: positions are found automatically.
            anywhere: Whether the texts are documents in the middle of prompts (True) or the start
                of prompts (False). Default: True for a list of texts in an engine with
                reuse="auto".
            preface: With `anywhere`, text to compute the documents after; default: a neutral one.
                The common start of your prompts is best.
            pin: Whether to exempt the text from eviction.
            ttl_s: Seconds until the pin ends; default: never.
            tenant: See `generate`.
            adapter: See `generate`.

        Raises:
            ConfigError: A text is empty, or an argument cannot be used.

        Example:
            >>> manual = 8 * " In winter the pump is kept in the cellar."
            >>> engine.warm(manual).num_computed
            88
            >>> engine.generate(manual + " Where is the pump?", max_new_tokens=4).cached_tokens
            88
            >>> pages = [manual, 8 * " In spring the filter is rinsed in warm water."]
            >>> engine.warm(pages, anywhere=True, pin=True, ttl_s=3600).num_texts
            2
        """
        if position_offset != 0:
            raise ConfigError(
                f"position_offset={position_offset}: expected 0, positions are found automatically"
            )
        if anywhere is None:
            is_list = not isinstance(content, str) and bool(content) and isinstance(content[0], str)
            anywhere = is_list and self._options.reuse == "auto"
        return self._warming.warm_all(
            texts_to_warm(content, self.tokenizer, anywhere=anywhere),
            tokens_of(preface or PREFACE, self.tokenizer) if anywhere else [],
            tenant=tenant,
            adapter=self._parts.model.adapters.find(adapter),
            is_pinned=pin,
            ttl_s=ttl_s,
        )

    def explain(
        self,
        prompt: Prompt,
        *,
        documents: Sequence[str] = (),
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        across_tenants: bool = False,
    ) -> ReuseReport:
        """Predict what a prompt would reuse, and why not more; the model does not run.

        Args:
            prompt: Text or token ids.
            documents: See `generate`.
            reuse: See `generate`.
            tenant: See `generate`.
            adapter: See `generate`.
            across_tenants: Also report text stored for other tenants; for operators only.

        Example:
            >>> manual = 8 * " In winter the pump is kept in the cellar."
            >>> engine.explain(manual).spans[0].reason
            'not seen before'
            >>> warmed = engine.warm(manual)
            >>> report = engine.explain(manual + " Where is the pump?")
            >>> print(report)
            88 tokens exact, 0 moved (0 of them computed again), 5 computed, predicted ...
        """
        request = self._calls.request(
            prompt, documents=documents, reuse=reuse, tenant=tenant, adapter=adapter
        )
        request = self._calls.loaded(request)
        work = partial(explain, request, self._parts, across_tenants=across_tenants)
        return self._worker.call(work)

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        documents: Sequence[str] = (),
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
    ) -> ScoreResult:
        """Log probabilities of continuations of a prompt.

        The prompt is computed once and stored; continuations are not stored.

        Args:
            prompt: Text or token ids.
            continuations: Texts or lists of token ids. A text is tokenized on its own: start it
                with the space before its first word.
            documents: See `generate`.
            reuse: See `generate`.
            tenant: See `generate`.
            adapter: See `generate`.

        Raises:
            ConfigError: A continuation is empty, there is none, or a token is unknown.
            UnsupportedModel: The model runs without reuse (`strict=False`).

        Example:
            >>> result = engine.score("The capital of France is", [" Paris", " Rome"])
            >>> paris, rome = result.scores
            >>> paris.logprob > rome.logprob, paris.is_greedy, rome.is_greedy
            (True, True, False)
        """
        request = self._calls.request(
            prompt, documents=documents, reuse=reuse, tenant=tenant, adapter=adapter
        )
        num_known = self._parts.model.num_embeddings
        tokens = continuation_tokens(continuations, self.tokenizer, num_known)
        return self._front.score(request, tokens)

    def verify_correctness(
        self,
        prompts: Sequence[Prompt] | None = None,
        max_new_tokens: int = 32,
        *,
        reuse: ReuseMode = "exact",
        adapter: str | None = None,
    ) -> CorrectnessReport:
        """Compare outputs with reuse against a full prefill.

        Each prompt is stored, then completed with and without reuse. With reuse="auto", each is
        completed with what the prompts before it have stored: give prompts that share text.

        Args:
            prompts: Texts or lists of token ids; default: two built-in texts.
            max_new_tokens: Tokens to compare per prompt.
            reuse: "exact" or "auto".
            adapter: See `generate`.

        Returns:
            A report that is true when all outputs are within the tolerance.

        Raises:
            UnsupportedModel: The model runs without reuse (`strict=False`).
            ConfigError: `reuse` is "off", or a prompt cannot be used.

        Example:
            >>> manual = 8 * " In winter the pump is kept in the cellar."
            >>> report = engine.verify_correctness([manual + " Where is it?"], max_new_tokens=4)
            >>> bool(report)
            True
        """
        if self._parts.model.refusal:
            raise UnsupportedModel(self._parts.model.refusal)
        if check_reuse(reuse) == "off":
            raise ConfigError("reuse='off' leaves nothing to verify: expected 'exact' or 'auto'")
        tokens = prompts_to_verify(prompts, self.tokenizer, self._parts)
        plain: dict[str, Any] = {"reuse": "off", "adapter": adapter, "do_sample": False}
        answers = [self.generate(each, max_new_tokens, **plain).token_ids for each in tokens]
        check = verify if reuse == "exact" else verify_moved
        parts = self._parts.under(self._parts.model.adapters.find(adapter))
        return self._worker.call(partial(check, tokens, answers, parts))

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters, sorted.

        Example:
            >>> engine.adapters
            []
        """
        return self._parts.model.adapters.names

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a PEFT adapter, between requests.

        Args:
            name: Name for requests. A loaded adapter of this name is replaced; the new one starts
                with an empty cache.
            folder: Folder or hub name.

        Raises:
            ConfigError: The adapter does not fit the model, or PEFT is not installed.

        Example:
            >>> engine.load_adapter("tone", "adapters/tone")
            >>> engine.adapters
            ['tone']
            >>> engine.explain("The capital of France is", adapter="tone").spans[0].kind.value
            'miss'
            >>> engine.unload_adapter("tone")
        """
        self._worker.call(partial(self._parts.model.load_adapter, name, folder))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running requests with it fail.

        Args:
            name: Name of a loaded adapter.

        Raises:
            ConfigError: No adapter has this name, or the model was loaded with it.

        Example:
            >>> engine.load_adapter("tone", "adapters/tone")
            >>> engine.unload_adapter("tone")
            >>> engine.adapters
            []
        """
        self._worker.call(partial(self._parts.model.adapters.unload, name))

    def cache_stats(self) -> dict[str, Any]:
        """Current sizes, and counters since the engine was created; returns at once.

        Call `flush` first to include the latest requests. Names ending in `_mb` are MiB, `_rate` is
        a share of chunks from 0 to 1.

        Example:
            >>> warmed = engine.warm(8 * " In winter the pump is kept in the cellar.")
            >>> stats = engine.cache_stats()
            >>> stats["hot_chunks"], stats["budget_mb"]
            (1, 2048.0)
        """
        return cache_stats(self._parts)

    @property
    def contents(self) -> Contents:
        """The stored chunks: list, pin and delete them.

        Example:
            >>> warmed = engine.warm(8 * " In winter the pump is kept in the cellar.")
            >>> chunk, = engine.contents.chunks(tenant="", limit=10)
            >>> chunk["num_tokens"], chunk["kind"]
            (88, 'exact')
            >>> engine.contents.delete(None, tenant="")  # all of this tenant
            Deletion(num_deleted=1, pending=())
        """
        return Contents(self._parts, self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Hash of the model's weights and configuration, in hexadecimal.

        Processes with the same fingerprint can share a cache.

        Example:
            >>> len(engine.fingerprint)
            64
        """
        return self._parts.model.fingerprint.hex()

    def watch(self, listener: StoreListener) -> None:
        """Report stored chunks to `listener`, now and whenever they change.

        Args:
            listener: Called on the threads that change the cache; must not block.

        Example:
            >>> class Stored(set):
            ...     def added(self, key: bytes, tokens: bytes, parent: bytes | None) -> None:
            ...         self.add(key)
            ...     def removed(self, key: bytes) -> None:
            ...         self.discard(key)
            >>> stored = Stored()
            >>> engine.watch(stored)
            >>> warmed = engine.warm(8 * " In winter the pump is kept in the cellar.")
            >>> len(stored)
            1
        """
        self._parts.store.index.watch(listener)

    def flush(self) -> None:
        """Wait until earlier requests are stored, promoted and audited.

        Waits at most a minute for tiers below memory.

        Example:
            >>> result = engine.generate(8 * " In winter the pump is kept in the cellar.", 4)
            >>> engine.flush()
            >>> engine.cache_stats()["hot_chunks"]
            1
        """
        self._worker.drain()
        self._parts.store.tiers.flush(FLUSH_S)

    def close(self) -> None:
        """Finish storing, stop the engine and restore the model's own attention.

        Later calls raise `KVBoostError`; closing twice is harmless.

        Example:
            >>> engine.close()
            >>> engine.generate("The capital of France is")
            Traceback (most recent call last):
            kvboost.errors.KVBoostError: the engine is closed
        """
        self._worker.check_caller()
        self._calls.close()
        self._worker.close()
        self._parts.model.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
