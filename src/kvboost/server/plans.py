"""Request bodies -> tokens, sampling, and the format of the reply."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from kvboost.core import Grammar, Sampling
from kvboost.engine.arrangement import Arrangement
from kvboost.engine.request import DocumentOrder
from kvboost.engine.results import Completion
from kvboost.engine.texts import chat_tokens, texts_to_warm, tokens_of
from kvboost.errors import ConfigError
from kvboost.server.answers import Ask
from kvboost.server.bodies import (
    MAX_SEED,
    CacheBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    TokenizeBody,
    WarmBody,
)
from kvboost.server.messages import Message, ObjectFormat, SchemaFormat
from kvboost.server.options import ServerOptions
from kvboost.server.problems import Problem, refused
from kvboost.server.replies import ChatReply, CompletionReply, Reply
from kvboost.server.response_events import ResponseReply
from kvboost.server.responses import ResponsesBody
from kvboost.server.tools import prepare

if TYPE_CHECKING:
    from kvboost.server.grammar import Grammars

COMPLETION_TOKENS = 16  # of an answer, where a client of /v1/completions names no limit
TOKEN_ID = re.compile("[0-9]{1,10}")
LOOKED_AT = 8  # characters for each token of the context; usual text has 3 to 5
SPARE = 1.1  # of the context: the end of a piece may split in another way than the whole
LEAST_TOP_P = 1e-6  # the most likely token always stays
# A template is a program, whose variables come from clients.
TEMPLATE_FAULTS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True)
class Served:
    """The model as clients see it."""

    name: str
    vocab_size: int
    context_tokens: int | None = None  # prompt and answer together; None: no limit is known
    most_answers: int | None = None  # at once, running and waiting
    adapters: tuple[str, ...] = ()  # names that stand for the model under an adapter

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request means by the name of a model; None: the model as it came.

        Raises:
            Problem: there is no such model.
        """
        if name in (None, self.name):
            return None
        if name not in self.adapters:
            known = ", ".join(map(repr, (self.name, *self.adapters)))
            reason = f"the model {name!r} does not exist; available: {known}"
            raise Problem(404, reason, param="model", code="model_not_found")
        return name


@dataclass(frozen=True)
class Plan:
    """What a request asks for; answers to one prompt follow each other."""

    asks: tuple[Ask, ...]
    num_each: int  # answers to each prompt
    num_kept: int  # of which these are returned
    reply: Reply
    is_stream: bool

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(ask.tokens) for ask in self.firsts(self.asks))

    @property
    def document_orders(self) -> list[tuple[int, ...]]:
        """How the documents of each prompt were arranged; empty where they were not."""
        return [ask.document_order for ask in self.firsts(self.asks)]

    @property
    def num_tokens(self) -> int:
        """The most tokens that the request can use."""
        return self.prompt_tokens + sum(ask.sampling.max_new_tokens for ask in self.asks)

    def firsts(self, each: Sequence[Any]) -> Sequence[Any]:
        """Of a list with an item per answer, those of the first answer to each prompt."""
        return each[:: self.num_each]

    def kept(self, answers: Sequence[Completion]) -> list[tuple[int, Completion]]:
        """The answers that are returned, numbered: all, or the most likely for each prompt."""
        if self.num_kept == self.num_each:
            return list(enumerate(answers))
        best: list[Completion] = []
        for start in range(0, len(answers), self.num_each):
            group = answers[start : start + self.num_each]
            best += sorted(group, key=_mean_logprob, reverse=True)[: self.num_kept]
        return list(enumerate(best))


class Planner:
    """Makes plans. One thread at a time: tokenizers and templates are not safe with several."""

    def __init__(
        self,
        tokenizer: Any,
        options: ServerOptions,
        model: Served,
        grammars: Grammars,
        arrange: Callable[[DocumentOrder, str, str | None], Arrangement | None],
    ) -> None:
        """`arrange` makes the arrangement of documents for a tenant and an adapter."""
        self._tokenizer = tokenizer
        self._arrange = arrange
        self._options = options
        self._model = model
        self._grammars = grammars
        # Arguments of the function that renders: no variables of a template.
        given = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"self", "messages", "documents", "arrangement", "tokenizer", *given}
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)  # characters

    def completion(self, body: CompletionBody, tenant: str) -> Plan:
        """The plan of /v1/completions."""
        adapter = self._model.adapter(body.model)
        num_kept = body.n or 1
        num_each = max(num_kept, body.best_of or 1)
        top_logprobs = body.logprobs
        if num_each > num_kept and top_logprobs is None:
            top_logprobs = 0
        asks: list[Ask] = []
        echoes: list[str] = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self._check_size(prompt)
            arrangement = self._arranging(body, tenant, adapter)
            tokens = tokens_of(prompt, self._tokenizer, body.documents or (), arrangement)
            wanted = body.max_tokens or min(COMPLETION_TOKENS, self._options.max_new_tokens)
            num_new = self._room(tokens, wanted, "max_tokens")
            free: list[Grammar | None] = [None] * num_each
            asks += self._asks(body, tokens, num_new, free, top_logprobs, arrangement)
            written = prompt
            if not isinstance(written, str) or arrangement is not None:
                written = self._tokenizer.decode(tokens)
            echoes += [written if body.echo else ""] * num_kept
        reply = CompletionReply(adapter or self._model.name, body, echoes)
        return self._plan(body, asks, num_each, num_kept, reply)

    def grammars(self, body: ChatBody) -> list[Grammar | None]:
        """The grammar of each answer; may be called from another thread."""
        return [self._grammar(body) for _ in range(body.n or 1)]

    def chat(self, body: ChatBody, grammars: Sequence[Grammar | None], tenant: str) -> Plan:
        """The plan of /v1/chat/completions."""
        adapter = self._model.adapter(body.model)
        arrangement = self._arranging(body, tenant, adapter)
        tokens = self._chat_tokens(body, arrangement)
        wanted = body.max_tokens or body.max_completion_tokens
        num_new = self._room(tokens, wanted, body.limit_name)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        reply = ChatReply(adapter or self._model.name, body)
        asks = self._asks(body, tokens, num_new, grammars, top_logprobs, arrangement)
        return self._plan(body, asks, len(grammars), len(grammars), reply)

    def response(
        self, body: ResponsesBody, chat: ChatBody, grammars: Sequence[Grammar | None], tenant: str
    ) -> Plan:
        """The plan of /v1/responses: that of the chat, with other events."""
        plan = self.chat(chat, grammars, tenant)
        return replace(plan, reply=ResponseReply(plan.reply.model, body))

    def tokenized(self, body: TokenizeBody) -> dict[str, Any]:
        """The answer of /tokenize; the prompt may be longer than the context."""
        self._model.adapter(body.model)
        if body.prompt is None:
            is_open = body.add_generation_prompt is not False
            tokens = self._chat_tokens(body.chat, add_generation_prompt=is_open)
        else:
            self._check_size(body.prompt)
            special = body.add_special_tokens is not False
            tokens = list(self._tokenizer(body.prompt, add_special_tokens=special).input_ids)
        entries = self._tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._model.context_tokens,
            "tokens": tokens,
            "token_strs": entries,
        }

    def detokenized(self, body: DetokenizeBody) -> dict[str, Any]:
        """The answer of /detokenize."""
        self._model.adapter(body.model)
        self._check_fits(body.tokens, param="tokens")
        return {"prompt": self._tokenizer.decode(body.tokens)}

    def stored(self, body: CacheBody) -> list[int]:
        """The tokens whose K/V to pin or delete."""
        if body.text is not None:
            self._check_size(body.text)
            tokens = tokens_of(body.text, self._tokenizer)
        else:
            tokens = self._rendered(self._as_in_a_chat(body.messages))
        self._check_fits(tokens)
        return tokens

    def warmed(self, body: WarmBody) -> str | list[str] | list[int]:
        """The texts to warm, none longer than a prompt may be."""
        self._model.adapter(body.model)
        for text in [body.text or "", body.preface or "", *(body.texts or ())]:
            self._check_size(text)
        content = body.text or body.texts or self._rendered(self._as_in_a_chat(body.messages))
        before = tokens_of(body.preface, self._tokenizer) if body.preface else []
        for tokens in texts_to_warm(content, self._tokenizer, anywhere=bool(body.anywhere)):
            self._check_fits([*before, *tokens])
        return content

    def _plan(
        self, body: Sampled, asks: Sequence[Ask], num_each: int, num_kept: int, reply: Reply
    ) -> Plan:
        most = self._model.most_answers
        if most is not None and len(asks) > most:
            raise refused(f"{len(asks)} answers at once; the limit is {most}", "n")
        return Plan(
            asks=tuple(asks),
            num_each=num_each,
            num_kept=num_kept,
            reply=reply,
            is_stream=bool(body.stream),
        )

    def _arranging(self, body: Sampled, tenant: str, adapter: str | None) -> Arrangement | None:
        """The arrangement of a request's documents, if it may reuse anything."""
        order = body.order if body.reuse != "off" else None
        return self._arrange(order or "given", tenant, adapter)

    def _asks(
        self,
        body: Sampled,
        tokens: Sequence[int],
        num_new: int,
        grammars: Sequence[Grammar | None],
        top_logprobs: int | None,
        arrangement: Arrangement | None,
    ) -> list[Ask]:
        """The answers to one prompt; with a seed, each has its own."""
        bias, adapter = self._bias(body.logit_bias or {}), self._model.adapter(body.model)
        order = () if arrangement is None else arrangement.order
        return [
            Ask(
                tokens,
                Sampling(
                    max_new_tokens=num_new,
                    temperature=1.0 if body.temperature is None else body.temperature,
                    top_k=min(max(0, body.top_k or 0), self._model.vocab_size),
                    top_p=1.0 if body.top_p is None else max(body.top_p, LEAST_TOP_P),
                    min_p=body.min_p or 0.0,
                    seed=None if body.seed is None else (body.seed + number) % MAX_SEED,
                    presence_penalty=body.presence_penalty or 0.0,
                    frequency_penalty=body.frequency_penalty or 0.0,
                    repetition_penalty=body.repetition_penalty or 1.0,
                    logit_bias=bias,
                    stop=body.stops,
                    ignore_eos=bool(body.ignore_eos),
                    top_logprobs=top_logprobs,
                    grammar=grammar,
                ),
                body.reuse,
                adapter,
                order,
            )
            for number, grammar in enumerate(grammars)
        ]

    def _chat_tokens(
        self,
        body: ChatBody,
        arrangement: Arrangement | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        choice = body.named_tool or body.tool_choice or "auto"
        calls = [call for each in body.messages for call in each.tool_calls or ()]
        self._check_size(*(call.function.arguments for call in calls))
        ready = prepare(_plain(body.messages), body.active_tools, choice, self._tokenizer)
        variables = body.template_variables
        for name in variables.keys() & self._reserved:
            raise refused(f"{name!r} is set by the server", "chat_template_kwargs")
        arguments = {**variables, **ready.arguments}
        arguments["add_generation_prompt"] = add_generation_prompt
        return self._rendered(ready.messages, body.documents or (), arrangement, **arguments)

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        documents: Sequence[str] = (),
        arrangement: Arrangement | None = None,
        **arguments: Any,
    ) -> list[int]:
        try:
            self._check_size(*(message["content"] for message in messages))
            return chat_tokens(messages, self._tokenizer, documents, arrangement, **arguments)
        except (ConfigError, Problem):
            raise
        except TEMPLATE_FAULTS as error:
            reason = f"the model's chat template cannot render this chat: {error}"
            raise Problem(400, reason, param="messages", code="invalid_value") from None

    def _as_in_a_chat(self, messages: Sequence[Message] | None) -> list[dict[str, Any]]:
        """Messages as a chat without tools renders them."""
        return prepare(_plain(messages), None, "auto", self._tokenizer).messages

    def _grammar(self, body: ChatBody) -> Grammar | None:
        if body.active_tools and (body.named_tool or body.tool_choice == "required"):
            return self._grammars.tool_call(body.active_tools, body.named_tool)
        if isinstance(body.response_format, ObjectFormat):
            return self._grammars.json_schema(None)
        if isinstance(body.response_format, SchemaFormat):
            return self._grammars.json_schema(body.response_format.json_schema.schema_ or {})
        return None

    def _room(self, tokens: Sequence[int], wanted: int | None, param: str) -> int:
        """How many tokens an answer may have."""
        most = self._options.max_new_tokens
        if wanted is not None and wanted > most:
            raise refused(f"{param}={wanted}: the limit is {most}", param)
        self._check_fits(tokens, wanted)
        if wanted or self._model.context_tokens is None:
            return wanted or most
        return min(most, self._model.context_tokens - len(tokens))

    def _check_size(self, *texts: str) -> None:
        """Refuse what cannot fit: others would wait while megabytes are tokenized."""
        num_chars = sum(map(len, texts))
        context = self._model.context_tokens
        if context is not None and num_chars > context * self._longest_token:
            raise _too_long(
                f"the prompt has {num_chars} characters; the model's context has {context} tokens"
            )
        if context is None or num_chars <= LOOKED_AT * context:
            return
        num_tokens, num_left = 0, LOOKED_AT * context
        for text in texts:
            ids = self._tokenizer(text[:num_left], add_special_tokens=False).input_ids
            num_tokens, num_left = num_tokens + len(ids), num_left - len(text[:num_left])
        if num_tokens > SPARE * context:
            raise _too_long(
                f"the prompt has more than {num_tokens} tokens; the model's context has {context}"
            )

    def _check_fits(
        self, tokens: Sequence[int], wanted: int | None = None, param: str = "prompt"
    ) -> None:
        num_prompt = len(tokens)
        if max(tokens, default=0) >= self._model.vocab_size:
            raise refused(f"token {max(tokens)} is not in the vocabulary", param)
        longest, context = self._options.max_prompt_tokens, self._model.context_tokens
        if longest is not None and num_prompt > longest:
            raise _too_long(f"the prompt has {num_prompt} tokens; the limit is {longest}")
        if context is not None and num_prompt + (wanted or 1) > context:
            asked = f" and {wanted} are to be generated" if wanted else ""
            raise _too_long(
                f"the prompt has {num_prompt} tokens{asked}; the model's context has {context}"
            )

    def _bias(self, written: dict[str, float]) -> dict[int, float]:
        bias = {}
        for name, value in written.items():
            if not (TOKEN_ID.fullmatch(name) and int(name) < self._model.vocab_size):
                raise refused(f"logit_bias: {name!r} is not a token of this model", "logit_bias")
            bias[int(name)] = value
        return bias


def _plain(messages: Sequence[Message] | None) -> list[dict[str, Any]]:
    return [message.plain for message in messages or ()]


def _too_long(message: str) -> Problem:
    return Problem(400, message, param="messages", code="context_length_exceeded")


def _mean_logprob(answer: Completion) -> float:
    return sum(each.logprob for each in answer.logprobs) / max(1, len(answer.logprobs))
