"""Messages, tools and output formats of chats, as clients send them."""

from __future__ import annotations

import json
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

MOST_FIELDS = 64  # of an object, known or not
MOST_MESSAGES = 2048  # and as many parts of one
MOST_CALLS = 128  # of tools, in a message
Label: TypeAlias = Annotated[str, StringConstraints(max_length=512)]
NAME = r"[a-zA-Z0-9_.-]{1,64}"
Name: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


def few(values: Any, most: int) -> Any:
    """Refuse too many entries: each could become an error of its own."""
    if isinstance(values, dict) and len(values) > most:
        raise ValueError(f"more than {most} entries")
    return values


def wrong(param: str, reason: str) -> PydanticCustomError:
    """An error of a parameter that does not fit another one."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


def is_writable(value: Any) -> bool:
    """Whether a value can be sent back: half a surrogate pair and infinity cannot."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def without_nulls(values: Any) -> Any:
    """An object without its null fields."""
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if value is not None}


def only_text(parts: Any, kinds: tuple[str, ...]) -> None:
    """Refuse content that is not text in a sentence of its own."""
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise ValueError(f"content of type {kind!r}: this model reads text only")


class Body(BaseModel):
    """What all bodies share: unknown names and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, values: Any) -> Any:
        return few(values, MOST_FIELDS)


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The function called in an earlier answer."""

    name: Name
    arguments: str


class Call(Body):
    """A tool call in an earlier answer."""

    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A chat message; null fields count as left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None
    ) = None
    name: Label | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: Label | None = None
    annotations: list[Any] | None = Field(None, description="OpenAI's own; ignored")

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, values: Any) -> Any:
        if isinstance(values, dict):
            only_text(values.get("content"), ("text",))
        return without_nulls(values)

    @model_validator(mode="after")
    def _say_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("only assistant messages can have tool_calls")
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


def few_parts(messages: Any) -> Any:
    """Refuse more parts than there may be messages, before each is looked at."""
    contents = [each.get("content") for each in _dicts(messages)]
    if sum(len(each) for each in contents if isinstance(each, list)) > MOST_MESSAGES:
        raise ValueError(f"more than {MOST_MESSAGES} parts in all")
    return messages


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


Messages: TypeAlias = Annotated[
    list[Message],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts),
]


class Function(Body):
    """What a tool does, and its parameters."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of type object")
    strict: bool | None = Field(None, description="no effect: schemas are always enforced")


class Tool(Body):
    """A function the model may call."""

    type: Literal["function"]
    function: Function


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class FunctionName(Body):
    """A function by its name."""

    name: Name


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class NamedSchema(Body):
    """A JSON schema and its name."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="no effect: schemas are always enforced")


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Format: TypeAlias = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
