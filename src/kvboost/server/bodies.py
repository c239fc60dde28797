"""Bodies of requests: every parameter is applied, accepted for a reason, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from kvboost.core import ReuseMode
from kvboost.engine.request import DocumentOrder
from kvboost.server.messages import (
    MOST_FIELDS,
    Body,
    Format,
    Label,
    Messages,
    NamedTool,
    ObjectFormat,
    SchemaFormat,
    Tools,
    few,
    is_writable,
    wrong,
)

MOST_ANSWERS = 64  # of one request: prompts x n
MOST_SCHEMA_BYTES = 128 * 1024  # of a JSON schema, or of all tools
MOST_TEMPLATE_BYTES = 16 * 1024  # of chat_template_kwargs
MOST_TEMPLATE_LEVELS = 8  # of lists and objects in it
SCALARS = (str, int, float, type(None))  # of JSON
MOST_BIASES = 1024
MAX_SEED = 2**63 - 1
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Stop: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId: TypeAlias = Annotated[int, Field(ge=0)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Temperature: TypeAlias = Annotated[float, Field(ge=0, le=2)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Documents: TypeAlias = Annotated[list[Text], Field(max_length=256)]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MODEL = "a name from /v1/models; optional"
TENANT = "default: the API key's tenant"
TEMPLATE = "variables for the model's chat template, such as enable_thinking"
EFFORT = "passed to the model's chat template; templates that do not use it ignore it"
REUSE = "which K/V to reuse; default: the server's --reuse"
DOCUMENTS = "parts of the prompt that other prompts may contain too; with reuse=auto found anywhere"
ORDER = "any: documents may be exchanged, so that the prompt continues a stored one; default: given"

REFUSED = {
    "store": "answers are not stored",
    "suffix": "text can only be added after a prompt",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are text",
    "prediction": "predicted outputs are not supported",
    "verbosity": "the model has no such setting",
    "web_search_options": "the server cannot search the web",
    "moderation": "the server does not moderate",
}
"""OpenAI's parameters that cannot be applied, and why; null is accepted."""
NO_TEMPLATE = "prompts are not rendered with a chat template"


def check_template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is too big."""
    level: list[Any] = [given]
    for _ in range(MOST_TEMPLATE_LEVELS + 1):
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for part in parts if not isinstance(part, SCALARS) for each in part]
    if level:
        raise ValueError(f"more than {MOST_TEMPLATE_LEVELS} nested levels")
    if len(json.dumps(given)) > MOST_TEMPLATE_BYTES:
        raise ValueError(f"more than {MOST_TEMPLATE_BYTES} bytes of JSON")
    return given


def _few_prompts(given: Any) -> Any:
    """Refuse too many prompts before validating each."""
    is_tokens = isinstance(given, list) and bool(given) and isinstance(given[0], int)
    if isinstance(given, list) and not is_tokens and len(given) > MOST_ANSWERS:
        raise ValueError(f"more than {MOST_ANSWERS} prompts")
    return given


TemplateKwargs: TypeAlias = Annotated[dict[str, Any], AfterValidator(check_template_kwargs)]


class Harmless(Body):
    """The table of OpenAI's parameters that are accepted although they change nothing here."""

    refuses: ClassVar[Mapping[str, str]] = {}  # and why

    user: Label | None = Field(None, description="for the client's own records")
    safety_identifier: Label | None = Field(None, description="like user")
    metadata: (
        Annotated[dict[Label, Label], BeforeValidator(partial(few, most=MOST_FIELDS))] | None
    ) = Field(None, description="for the client's own records")
    store: Literal[False] | None = Field(None, description="only false: answers are not stored")
    service_tier: Literal["auto", "default"] | None = Field(None, description="there is one tier")
    prompt_cache_key: Label | None = Field(None, description="no effect: K/V is found by its text")
    prompt_cache_retention: Label | None = Field(
        None, description="no effect: the cache evicts by its budget"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, reason in cls.refuses.items():
                value, may_be_off = values.get(name), name in cls.model_fields
                if value is not None and not (value is False and may_be_off):
                    raise wrong(name, f"{name!r} is not supported: {reason}")
            unknown = cls.refuses.keys() - cls.model_fields.keys()
            return {name: value for name, value in values.items() if name not in unknown}
        return values


class StreamOptions(Body):
    """OpenAI's stream_options."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampled(Harmless):
    """The parameters of both kinds of completions."""

    refuses = REFUSED

    model: Label | None = Field(None, description=MODEL)
    max_tokens: Count | None = None
    temperature: Temperature | None = Field(
        None, description="0 is greedy; higher values sample; default: 1"
    )
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: all tokens")
    min_p: Probability | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = Field(None, description="answers per prompt")
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Bias], BeforeValidator(partial(few, most=MOST_BIASES))] | None
    ) = Field(None, description="by token id")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-text token")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reuse: ReuseMode | None = Field(None, description=REUSE)
    documents: Documents | None = Field(None, description=DOCUMENTS)
    order: DocumentOrder | None = Field(None, description=ORDER)

    @model_validator(mode="after")
    def _fit(self) -> Sampled:
        if self.order == "any" and not self.documents:
            raise wrong("order", "order needs documents")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options needs stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Sampled):
    """The body of /v1/completions."""

    refuses = REFUSED | {"reasoning_effort": NO_TEMPLATE, "chat_template_kwargs": NO_TEMPLATE}

    prompt: Annotated[
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_ANSWERS)],
        BeforeValidator(_few_prompts),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = Field(None, description="put the prompt before the answer")
    best_of: Annotated[int, Field(ge=1, le=16)] | None = Field(
        None, description="generate so many, return the n most likely"
    )

    @model_validator(mode="after")
    def _fit_completion(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise wrong("echo", "echo excludes logprobs: prompts have none")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise wrong("best_of", "best_of must be at least n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise wrong("best_of", "best_of above n cannot be streamed")
        if self.order == "any" and len(self.prompts) > 1:
            raise wrong("order", "order='any' needs a single prompt")
        if len(self.prompts) * max(self.n or 1, self.best_of or 1) > MOST_ANSWERS:
            raise wrong("prompt", f"more than {MOST_ANSWERS} answers in one request")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatBody(Sampled):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    reasoning_effort: Effort | None = Field(None, description=EFFORT)
    chat_template_kwargs: TemplateKwargs | None = Field(None, description=TEMPLATE)

    @model_validator(mode="after")
    def _fit_chat(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            reason = "max_tokens and max_completion_tokens are the same: give one of them"
            raise wrong("max_tokens", reason)
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise wrong("tool_choice", "tool_choice needs tools")
        if self.named_tool not in (None, *(tool.function.name for tool in self.tools or ())):
            raise wrong("tool_choice", f"tool_choice: no tool is named {self.named_tool!r}")
        if self.active_tools and isinstance(self.response_format, ObjectFormat | SchemaFormat):
            reason = "JSON output and tools exclude each other, except with tool_choice='none'"
            raise wrong("response_format", reason)
        if self.reasoning_effort and "reasoning_effort" in (self.chat_template_kwargs or {}):
            reason = "reasoning_effort is in chat_template_kwargs too: give one of them"
            raise wrong("reasoning_effort", reason)
        schema = self.response_format.model_dump() if self.response_format else None
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        for name, value in (("tools", tools), ("response_format", schema)):
            if not is_writable(value):
                raise wrong(name, f"{name}: JSON has no infinite numbers and no broken characters")
            if len(json.dumps(value)) > MOST_SCHEMA_BYTES:
                what = "tools" if name == "tools" else "the JSON schema"
                raise wrong(name, f"{what}: more than {MOST_SCHEMA_BYTES} bytes of JSON")
        return self

    @property
    def limit_name(self) -> str:
        """The client's name for the limit of output tokens."""
        return "max_tokens" if self.max_tokens else "max_completion_tokens"

    @property
    def named_tool(self) -> str | None:
        """The one function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def has_form(self) -> bool:
        """Whether the output has a required form: JSON or a call."""
        must_call = self.tool_choice == "required" or self.named_tool is not None
        return must_call or isinstance(self.response_format, ObjectFormat | SchemaFormat)

    @property
    def active_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called, in OpenAI's shape."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides messages and tools."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {**effort, **(self.chat_template_kwargs or {})}


def as_chat(kind: type[ChatBody], names: Mapping[str, str], **fields: Any) -> ChatBody:
    """Another request as a chat; `names` are what the client calls the chat's parameters."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["ctx"]["param"] if first["type"] == "refused" else first["loc"][0])
        raise wrong(names.get(param, param), first["msg"]) from None


class TokenizeBody(Body):
    """The body of /tokenize: a prompt, or messages as a chat has them."""

    model: Label | None = Field(None, description=MODEL)
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="of a prompt; default: true; chat templates bring their own"
    )
    add_generation_prompt: bool | None = Field(None, description="of messages; default: true")
    tools: Tools | None = Field(None, description="of messages")
    chat_template_kwargs: TemplateKwargs | None = Field(None, description=TEMPLATE)
    return_token_strs: bool | None = Field(None, description="add the vocabulary's entries")
    _chat: ChatBody = PrivateAttr()

    @model_validator(mode="after")
    def _fit_tokenize(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give one of prompt, messages")
        if self.messages is not None and self.add_special_tokens:
            raise wrong("add_special_tokens", "add_special_tokens is for prompts, not messages")
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise wrong(name, f"{name} is for messages, not prompts")
        if self.messages is not None:
            names = ("messages", "tools", "chat_template_kwargs")
            self._chat = as_chat(ChatBody, {}, **{name: getattr(self, name) for name in names})
        return self

    @property
    def chat(self) -> ChatBody:
        """The messages as a chat, if there are any."""
        return self._chat


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: Label | None = Field(None, description=MODEL)
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class WarmBody(Body):
    """The body of /v1/warm: one of text, texts, messages."""

    text: Text | None = Field(None, description="the start of later prompts")
    texts: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None
    messages: Messages | None = Field(None, description="the start of later chats")
    anywhere: bool | None = Field(
        None, description="store for approximate reuse at any position, for reuse=auto"
    )
    preface: Text | None = Field(None, description="text to encode before each; default: built in")
    pin: bool = Field(default=False, description="exempt from eviction")
    ttl_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="how long the pin lasts; default: until deleted"
    )
    model: Label | None = Field(None, description=MODEL)
    tenant: Label | None = Field(None, description=TENANT)

    @model_validator(mode="after")
    def _fit_warm(self) -> WarmBody:
        if sum(each is not None for each in (self.text, self.texts, self.messages)) != 1:
            raise wrong("text", "give one of text, texts, messages")
        if self.preface and not (self.texts if self.anywhere is None else self.anywhere):
            raise wrong("preface", "preface needs anywhere=true, or texts")
        return self


class CacheBody(Body):
    """The cached text to pin or delete: one of text, messages, everything."""

    text: Text | None = None
    messages: Messages | None = None
    everything: bool = Field(default=False, description="all of the tenant's text; delete only")
    ttl_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="how long the pin lasts; pin only"
    )
    tenant: Label | None = Field(None, description=TENANT)

    @model_validator(mode="after")
    def _fit_cache(self) -> CacheBody:
        if (self.text is not None) + (self.messages is not None) + self.everything != 1:
            raise wrong("text", "give one of text, messages, everything")
        return self
