"""Bodies of requests: every parameter is applied, accepted for a reason, or refused."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvboost.core import ReuseMode

MOST_ANSWERS = 64  # of one request: prompts x n
MOST_SCHEMA_BYTES = 128 * 1024  # of a JSON schema, or of all tools
MOST_FIELDS = 64  # of an object, known or not
MOST_BIASES = 1024
MOST_MESSAGES = 2048  # and as many parts of one
MOST_CALLS = 128  # of tools, in a message
MAX_SEED = 2**63 - 1
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Label: TypeAlias = Annotated[str, StringConstraints(max_length=512)]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Stop: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIds: TypeAlias = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)
]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


def few(values: Any, most: int) -> Any:
    """The same, unless it has too many entries: each could become an error of its own."""
    if isinstance(values, dict) and len(values) > most:
        raise ValueError(f"more than {most} entries")
    return values


def wrong(param: str, reason: str) -> PydanticCustomError:
    """What is wrong with a parameter whose value alone is right."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


class Body(BaseModel):
    """What all bodies share: unknown names and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, values: Any) -> Any:
        return few(values, MOST_FIELDS)


class Harmless(Body):
    """The table of OpenAI's parameters that are accepted although they change nothing here."""

    user: Label | None = Field(None, description="for the client's own records")
    safety_identifier: Label | None = Field(None, description="like user")
    metadata: (
        Annotated[dict[Label, Label], BeforeValidator(partial(few, most=MOST_FIELDS))] | None
    ) = Field(None, description="kept only with store")
    store: Literal[False] | None = Field(None, description="answers are never kept: only false")
    service_tier: Literal["auto", "default"] | None = Field(None, description="there is one tier")
    prompt_cache_key: Label | None = Field(None, description="reuse goes by the text itself")
    prompt_cache_retention: Label | None = Field(None, description="the cache has a budget instead")


class StreamOptions(Body):
    """OpenAI's stream_options."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampled(Harmless):
    """The parameters of both kinds of completions."""

    model: Label | None = Field(None, description="as /v1/models has it; may be left out")
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: all tokens")
    min_p: Probability | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Bias], BeforeValidator(partial(few, most=MOST_BIASES))] | None
    ) = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reuse: ReuseMode | None = Field(None, description="what K/V to reuse; None: as configured")
    documents: Annotated[list[Text], Field(max_length=256)] | None = Field(
        None, description="texts in the prompt that may stand in others too: found anywhere"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, reason in REFUSED.items():
                if values.get(name) is not None:
                    raise wrong(name, f"{name!r} cannot be applied: {reason}")
            return {name: value for name, value in values.items() if name not in REFUSED}
        return values

    @model_validator(mode="after")
    def _fit(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options needs stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


REFUSED = {
    "suffix": "text is only written after a prompt, not between two",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are text",
    "prediction": "nothing is computed ahead",
    "reasoning_effort": "the model has no such setting",
    "verbosity": "the model has no such setting",
    "web_search_options": "nothing is searched",
    "moderation": "nothing is moderated",
}
"""OpenAI's parameters that cannot be applied, and why; null is accepted."""


class CompletionBody(Sampled):
    """The body of /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_ANSWERS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None

    @model_validator(mode="after")
    def _fit_completion(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise wrong("echo", "echo with logprobs: those of the prompt are not computed")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise wrong("best_of", "best_of must not be below n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise wrong("best_of", "best_of above n cannot be streamed")
        if len(self.prompts) * max(self.n or 1, self.best_of or 1) > MOST_ANSWERS:
            raise wrong("prompt", f"more than {MOST_ANSWERS} answers in one request")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """Which function an earlier answer called."""

    name: Name
    arguments: str


class Call(Body):
    """A tool call of an earlier answer."""

    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of a chat; fields that are null count as left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None
    ) = None
    name: Label | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: Label | None = None
    annotations: list[Any] | None = Field(None, description="of OpenAI's own answers; left out")

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        parts = values.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"content of type {kind!r}: this model reads text only")
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _say_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return plain


Messages: TypeAlias = Annotated[
    list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
]


class Function(Body):
    """What a tool does and takes."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function by its name."""

    name: Name


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class NamedSchema(Body):
    """A JSON schema and what it is called."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Format: TypeAlias = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class ChatBody(Sampled):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _fit_chat(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise wrong("max_tokens", "max_tokens is max_completion_tokens: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise wrong("tool_choice", "tool_choice needs tools")
        if self.named_tool not in (None, *(tool.function.name for tool in self.tools or ())):
            raise wrong("tool_choice", f"tool_choice names no tool: {self.named_tool!r}")
        if self.active_tools and isinstance(self.response_format, ObjectFormat | SchemaFormat):
            reason = "response_format and tools exclude each other; tool_choice='none'?"
            raise wrong("response_format", reason)
        schema = self.response_format.model_dump() if self.response_format else None
        for name, value in (("tools", self.active_tools), ("response_format", schema)):
            if len(json.dumps(value)) > MOST_SCHEMA_BYTES:
                raise wrong(name, f"{name} is above {MOST_SCHEMA_BYTES} bytes of JSON")
        return self

    @property
    def named_tool(self) -> str | None:
        """The one function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def has_form(self) -> bool:
        """Whether the answer must form something: JSON or a call."""
        must_call = self.tool_choice == "required" or self.named_tool is not None
        return must_call or isinstance(self.response_format, ObjectFormat | SchemaFormat)

    @property
    def active_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called, in OpenAI's shape."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class WarmBody(Body):
    """The body of /v1/warm: one of the three."""

    text: Text | None = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None
    messages: Messages | None = None
    anywhere: bool | None = None
    preface: Text | None = None
    pin: bool = False
    ttl_s: Annotated[float, Field(gt=0)] | None = None
    model: Label | None = Field(None, description="as /v1/models has it; may be left out")
    tenant: Label | None = Field(None, description="None: that of the API key")

    @model_validator(mode="after")
    def _fit_warm(self) -> WarmBody:
        if sum(each is not None for each in (self.text, self.texts, self.messages)) != 1:
            raise wrong("text", "give one of text, texts, messages")
        return self


class CacheBody(Body):
    """Which stored text is meant, for /v1/cache/pin and /v1/cache/delete."""

    text: Text | None = None
    messages: Messages | None = None
    everything: bool = Field(default=False, description="all that the tenant has; only to delete")
    ttl_s: Annotated[float, Field(gt=0)] | None = Field(None, description="only to pin")
    tenant: Label | None = Field(None, description="None: that of the API key")

    @model_validator(mode="after")
    def _fit_cache(self) -> CacheBody:
        if (self.text is not None) + (self.messages is not None) + self.everything != 1:
            raise wrong("text", "give one of text, messages, everything")
        return self
