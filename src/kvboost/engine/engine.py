"""`KVBoost`: the library's front door. Calls from any thread; requests are computed in turn."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvboost.build import build
from kvboost.config import certified_folder, check_reuse, make_options
from kvboost.core import ReuseMode, Sampling, StoreListener
from kvboost.engine.batch.arguments import sampling_of
from kvboost.engine.batch.front import BatchFront
from kvboost.engine.batch.member import Listener
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.calls import Calls
from kvboost.engine.contents import Contents
from kvboost.engine.explain import explain
from kvboost.engine.request import DEFAULT_NEW_TOKENS
from kvboost.engine.results import (
    CorrectnessReport,
    GenerationMode,
    GenerationResult,
    ReuseReport,
    WarmResult,
)
from kvboost.engine.score import ScoreResult, continuation_tokens, score
from kvboost.engine.stats import cache_stats
from kvboost.engine.stream import TextStream, text_of
from kvboost.engine.texts import PREFACE, chat_tokens, texts_to_warm, tokens_of
from kvboost.engine.verify import prompts_to_verify, verify, verify_moved
from kvboost.engine.warm import Warming
from kvboost.engine.worker import Worker
from kvboost.errors import ConfigError, KVBoostError, UnsupportedModel
from kvboost.models.hf import HFModel
from kvboost.models.load import MODEL_ONLY, SHARED, boundary_tokens, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Self

    from kvboost.engine.texts import Messages, Prompt

FLUSH_S = 60.0  # what `flush` waits for these tiers


class KVBoost:
    """A language model that does not read again what it has read before.

    Calls may come from any thread. They are computed in turn, those of `generate_batch` and
    `submit` together. As a context manager it is closed at the end.

    Example:
        In the examples of the methods `engine` is this one.

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
        **options: Any,
    ) -> None:
        """Certify `model` and put it to work; `kvboost.config.Options` lists the options.

        The model computes a short text both ways for that. `adapters` are PEFT adapters by name,
        each a folder or a name on the hub. Until `close`, the model runs with our attention
        functions, also outside the engine.

        Raises:
            UnsupportedModel: the model's K/V cannot be reused (unless `strict=False`).
            ConfigError: an option has a wrong name or value, an adapter does not fit.
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
        self._calls = Calls(self._parts, tokenizer, self._worker)
        self._front = BatchFront(self._parts, tokenizer, self._worker, self._calls.loading)
        self._warming = Warming(self._parts, self._worker, self._front.is_busy)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        device: str | None = None,
        adapters: Mapping[str, str] | None = None,
        max_weight_bytes: int | None = None,
        **arguments: Any,
    ) -> Self:
        """Load a model and its tokenizer by name, folder or GGUF file, and adapters.

        With `max_weight_bytes` a model runs that does not fit: at most that much of its weights is
        in memory at a time. `arguments` are our options and those of Transformers'
        `from_pretrained` (dtype, revision, gguf_file, quantization_config ...). The model goes to
        `device`; None: to a GPU if there is one.

        Raises:
            UnsupportedModel: the model's K/V cannot be reused (unless `strict=False`).
            ConfigError: an option has a wrong name or value, an adapter does not fit.
            OSError: there is no such model, as Transformers says it.

        Example:
            >>> name = "HuggingFaceTB/SmolLM2-135M-Instruct"
            >>> with KVBoost.from_pretrained(name, dtype="float32", max_cache_bytes=2**30) as other:
            ...     other.generate("The capital of France is", max_new_tokens=2).output_text
            ' Paris.'
        """
        host_names = {*SHARED, *MODEL_ONLY}
        own = {name: value for name, value in arguments.items() if name not in host_names}
        make_options(own, also_known={*host_names, "adapters", "device", "max_weight_bytes"})
        host = {name: value for name, value in arguments.items() if name in host_names}
        return cls(*load(model, device, host, max_weight_bytes), adapters=adapters, **own)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        documents: Sequence[str] = (),
        mode: GenerationMode | None = None,
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        **arguments: Any,
    ) -> GenerationResult:
        """Answer a prompt, given as text or token ids, and wait for the whole answer.

        `documents` are texts in the prompt that may stand in others too: each is tokenized by
        itself, so that it has the same tokens wherever it stands. Greedy unless `do_sample=True`;
        any argument of Transformers' `generate()` works, but for its cache. Without
        `max_new_tokens` 64 at most. `reuse` is "off", "exact" or "auto", None: as the engine was
        made. `tenant` separates stores: one tenant's prompts never hit another's. `adapter` names
        one that is loaded, with a store of its own; None: the model as it came, "": the base model.
        `mode` is `reuse` by the names of the original package.

        Raises:
            ConfigError: the prompt is empty, or an argument cannot be used.
            KVBoostError: the engine is closed.

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
        request = self._calls.request(
            prompt, max_new_tokens, documents, mode, reuse, tenant, adapter, **arguments
        )
        return self._calls.run(request)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> list[GenerationResult]:
        """Answer several prompts together; what they share is computed once and held once.

        `per_prompt` holds arguments of single prompts, which win over the common ones. Prompts
        with arguments that only Transformers' `generate()` knows are answered one by one. Waits for
        all answers, which come in the order of the prompts.

        Raises:
            ConfigError: a prompt or argument cannot be used.

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
            raise ConfigError("generate_batch takes a list of prompts, not a text")
        own = per_prompt or [{}] * len(prompts)
        if len(own) != len(prompts):
            raise ConfigError(f"per_prompt has {len(own)} entries for {len(prompts)} prompts")
        common = {"max_new_tokens": max_new_tokens, **arguments}
        requests = [
            self._calls.request(prompt, **{**common, **each})
            for prompt, each in zip(prompts, own, strict=True)
        ]
        samplings = [sampling_of(each.arguments, self._parts.model) for each in requests]
        return self._front.answer_all(requests, samplings, self._calls.run)

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
        """Let a prompt join the batch of all that are being answered; returns at once.

        The ticket's `result()` waits for the answer, `cancel()` gives it up. `listener` gets each
        new piece of the answer on the engine's thread, and must be quick. Without `sampling`:
        `default_sampling`. A request that is not done after `deadline_s` seconds ends with
        `DeadlineExceeded`; None: it may take its time.

        Raises:
            QueueFull: too many wait already.
            ConfigError: the prompt and its answer do not fit.
            UnsupportedModel: the model is one that was let in by `strict=False`.

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
        """What the model's own generation config asks for; greedy if it says nothing.

        Example:
            >>> engine.default_sampling().max_new_tokens
            64
        """
        return sampling_of({"max_new_tokens": DEFAULT_NEW_TOKENS}, self._parts.model) or Sampling()

    def batch_stats(self) -> dict[str, Any]:
        """Who runs and waits, and the K/V that they work on; returns at once.

        Example:
            >>> stats = engine.batch_stats()
            >>> stats["num_running"], stats["num_waiting"], stats["max_batch_size"]
            (0, 0, 16)
        """
        return self._front.stats()

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        documents: Sequence[str] = (),
        mode: GenerationMode | None = None,
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        **arguments: Any,
    ) -> TextStream:
        """Answer like `generate`, but give the text as it comes; returns at once.

        Raises:
            ConfigError: the prompt is empty, or an argument cannot be used.

        Example:
            >>> "".join(engine.stream("The capital of France is", max_new_tokens=2))
            ' Paris.'
        """
        request = self._calls.request(
            prompt, max_new_tokens, documents, mode, reuse, tenant, adapter, **arguments
        )
        return TextStream(partial(self._calls.start, request))

    def astream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        documents: Sequence[str] = (),
        mode: GenerationMode | None = None,
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        **arguments: Any,
    ) -> AsyncIterator[str]:
        """Answer like `stream`, for asyncio: the event loop stays free while the model computes.

        Nothing is computed before the first piece is asked for; leaving the loop stops it.

        Example:
            >>> import asyncio
            >>> async def answer(prompt: str) -> str:
            ...     return "".join([text async for text in engine.astream(prompt, 2)])
            >>> asyncio.run(answer("The capital of France is"))
            ' Paris.'
        """
        request = self._calls.request(
            prompt, max_new_tokens, documents, mode, reuse, tenant, adapter, **arguments
        )
        return text_of(partial(self._calls.start, request))

    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = None,
        *,
        tools: Any = None,
        documents: Sequence[str] = (),
        mode: GenerationMode | None = None,
        reuse: ReuseMode | None = None,
        tenant: str = "",
        adapter: str | None = None,
        **arguments: Any,
    ) -> GenerationResult:
        """Answer a conversation, in the model's own chat template.

        A history is found again as far as the template renders earlier messages as before and
        the tokenizer splits an answer as the model did. `tools` go to the template; the other
        arguments are those of `generate`.

        Example:
            >>> messages = [{"role": "user", "content": "What is the capital of France?"}]
            >>> reply = engine.chat(messages, max_new_tokens=16)
            >>> "Paris" in reply.output_text
            True
            >>> messages.append({"role": "assistant", "content": reply.output_text})
            >>> messages.append({"role": "user", "content": "And of Italy?"})
            >>> engine.chat(messages, max_new_tokens=4).kv_reuse_ratio > 0.7
            True
        """
        started_at = time.perf_counter()
        tokens = chat_tokens(
            messages, self.tokenizer, documents, tools=tools, add_generation_prompt=True
        )
        request = self._calls.request(
            tokens, max_new_tokens, (), mode, reuse, tenant, adapter, **arguments
        )
        return self._calls.run(replace(request, started_at=started_at))

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
        """Read text before it is needed: a text, a list of texts, chat messages, or token ids.

        With `anywhere`, which is the default for lists of texts in an engine with reuse="auto",
        each text is a document that will stand in the middle of prompts; it is encoded behind
        `preface` (a neutral text; best: the beginning that your prompts have in common). Otherwise
        it is the beginning of prompts. `pin` keeps it from being evicted, for `ttl_s` seconds if
        given. Waits until all is read; answers that run meanwhile have their turns.

        Raises:
            ConfigError: a text is empty, or an argument cannot be used.

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
                f"position_offset={position_offset}: positions are found by themselves"
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
        """Say which spans of a prompt the store would supply now, and why not more.

        The model does not run. `across_tenants` also tells what is stored for other tenants: for
        operators only.

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
        """How likely each of several continuations of a prompt is to the model.

        The prompt is computed once, as far as it is not stored, and stored; continuations are not.
        A continuation that is text is tokenized by itself: begin it with the space before its
        first word.

        Raises:
            ConfigError: there is no continuation, one is empty, or the model lacks a token.
            UnsupportedModel: the engine runs a model that it cannot reuse K/V for.

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
        work = partial(score, self._calls.loaded(request), tokens, self._parts)
        return self._worker.submit(work).result()

    def verify_correctness(
        self,
        prompts: Sequence[Prompt] | None = None,
        max_new_tokens: int = 32,
        *,
        reuse: ReuseMode = "exact",
        adapter: str | None = None,
    ) -> CorrectnessReport:
        """Check, on your prompts or on built-in ones, how far reuse changes answers.

        Each prompt is stored, then answered with and without reuse. With reuse="auto" each is
        answered on what the ones before it left in the store, so give prompts that share text.
        The report is true when it holds, and prints as a sentence.

        Raises:
            UnsupportedModel: the model is one that was let in by `strict=False`.
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
            raise ConfigError("reuse='off': there is nothing to verify")
        tokens = prompts_to_verify(prompts, self.tokenizer, self._parts)
        plain: dict[str, Any] = {"reuse": "off", "adapter": adapter, "do_sample": False}
        answers = [self.generate(each, max_new_tokens, **plain).token_ids for each in tokens]
        check = verify if reuse == "exact" else verify_moved
        parts = self._parts.under(self._parts.model.adapters.find(adapter))
        return self._worker.call(partial(check, tokens, answers, parts))

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that requests can have, sorted.

        Example:
            >>> engine.adapters
            []
        """
        return self._parts.model.adapters.names

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a PEFT adapter from a folder or the hub, between requests.

        One that has the name already is replaced, and has another store than the new one.

        Raises:
            ConfigError: it cannot be used with this model, or PEFT is not installed.

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
        """Forget an adapter; requests that still run under it end with an error.

        Raises:
            ConfigError: there is none of this name, or it is what the model came with.

        Example:
            >>> engine.load_adapter("tone", "adapters/tone")
            >>> engine.unload_adapter("tone")
            >>> engine.adapters
            []
        """
        self._worker.call(partial(self._parts.model.adapters.unload, name))

    def cache_stats(self) -> dict[str, Any]:
        """Tell sizes now and counts since the engine was made; `flush` first to miss nothing.

        Returns at once. Names that end in `_mb` are MiB, `_rate` is a share of chunks, 0..1.

        Example:
            >>> warmed = engine.warm(8 * " In winter the pump is kept in the cellar.")
            >>> stats = engine.cache_stats()
            >>> stats["hot_chunks"], stats["budget_mb"]
            (1, 2048.0)
        """
        return cache_stats(self._parts)

    @property
    def contents(self) -> Contents:
        """What is stored, to look at, to pin and to delete.

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
        """What the model's K/V is stored under, in hexadecimal, of its weights and settings.

        Processes with the same fingerprint can share a store.

        Example:
            >>> len(engine.fingerprint)
            64
        """
        return self._parts.model.fingerprint.hex()

    def watch(self, listener: StoreListener) -> None:
        """Tell `listener` of all that is stored, and from now on of what comes and goes.

        It is called on the threads that change the store, and must not wait.

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
        """Wait until what earlier calls computed is stored and their audits are done.

        For tiers below memory at most a minute.

        Example:
            >>> result = engine.generate(8 * " In winter the pump is kept in the cellar.", 4)
            >>> engine.flush()
            >>> engine.cache_stats()["hot_chunks"]
            1
        """
        self._worker.drain()
        self._parts.store.tiers.flush(FLUSH_S)

    def close(self) -> None:
        """Finish storing and give the model back as it was.

        Later calls raise `KVBoostError`; closing again does nothing.

        Example:
            >>> engine.close()
            >>> engine.generate("The capital of France is")
            Traceback (most recent call last):
            kvboost.errors.KVBoostError: the engine is closed
        """
        self._calls.close()
        self._worker.close()
        self._parts.model.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
