"""Requests of OpenAI's Responses API, which become chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from kvboost.core import ReuseMode
from kvboost.engine.request import DocumentOrder
from kvboost.server.bodies import (
    DOCUMENTS,
    EFFORT,
    MODEL,
    ORDER,
    REUSE,
    TEMPLATE,
    ChatBody,
    Count,
    Documents,
    Effort,
    Harmless,
    Probability,
    Temperature,
    TemplateKwargs,
    Text,
    as_chat,
)
from kvboost.server.messages import (
    MOST_MESSAGES,
    Body,
    Label,
    Name,
    NamedSchema,
    ObjectFormat,
    TextFormat,
    few_parts,
    only_text,
    without_nulls,
)
from kvboost.server.replies import Json

NO_STATE = "this server keeps no state; send the whole conversation as input"
NOT_SUPPORTED = {
    "store": NO_STATE,
    "previous_response_id": NO_STATE,
    "conversation": NO_STATE,
    "background": NO_STATE,
    "prompt": "there are no stored prompts",
    "context_management": "the server does not shorten conversations",
    "max_tool_calls": "there are no built-in tools",
    "top_logprobs": "use /v1/chat/completions for log probabilities",
    "moderation": "the server does not moderate",
}
CHAT_NAMES = {"response_format": "text", "messages": "input"}  # what they are called here
TEXT_KINDS = ("input_text", "output_text")
NO_EFFECT = "no effect"


class InputText(Body):
    """Text in an input item."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description=NO_EFFECT)
    logprobs: list[Any] | None = Field(None, description=NO_EFFECT)


Content: TypeAlias = (
    str | Annotated[list[InputText], Field(max_length=MOST_MESSAGES, fail_fast=True)]
)


class Item(Body):
    """What all input items share; null fields count as left out."""

    id: Label | None = Field(None, description=NO_EFFECT)
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(
        None, description=NO_EFFECT
    )

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, values: Any) -> Any:
        if isinstance(values, dict):
            only_text(values.get("content"), TEXT_KINDS)
            only_text(values.get("output"), TEXT_KINDS)
        return without_nulls(values)


class InputMessage(Item):
    """A message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = Field(None, description=NO_EFFECT)


class InputCall(Item):
    """A function call from an earlier response."""

    type: Literal["function_call"]
    call_id: Label
    name: Name
    arguments: str


class InputResult(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Content


# Tags that nobody takes for the name of a parameter.
TAGS = {"message": "Message", "function_call": "Call", "function_call_output": "Result"}


def _tag_of_item(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else None
    return TAGS.get("message" if kind is None else str(kind))


InputItem: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[InputCall, Tag("Call")]
    | Annotated[InputResult, Tag("Result")],
    Discriminator(
        _tag_of_item,
        custom_error_type="item_type",
        custom_error_message="expected a message, function_call or function_call_output",
    ),
]


Items: TypeAlias = Annotated[
    list[InputItem],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts),
]
Input: TypeAlias = Annotated[
    Annotated[Text, Tag("Text")] | Annotated[Items, Tag("Items")],
    Discriminator(lambda given: "Text" if isinstance(given, str) else "Items"),
]


class FunctionTool(Body):
    """A function the model may call, as chats have it but flat."""

    type: Literal["function"]  # first: of another kind of tool, the rest does not matter
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of type object")
    strict: bool | None = Field(None, description="no effect: schemas are always enforced")


class FunctionChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    name: Name


class FlatSchemaFormat(NamedSchema):
    """JSON that fits a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the output text."""

    format: (
        Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None
    ) = None


class Reasoning(Body):
    """How much a model reasons."""

    effort: Effort | None = Field(None, description=EFFORT)
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="no effect: reasoning is part of the text"
    )


class ResponseStreamOptions(Body):
    """The options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponseChat(ChatBody):
    """The chat made of a request."""

    @property
    def limit_name(self) -> str:
        """The client's name for the limit of output tokens."""
        return "max_output_tokens"


class ResponsesBody(Harmless):
    """The body of /v1/responses."""

    refuses = NOT_SUPPORTED

    model: Label | None = Field(None, description=MODEL)
    input: Input
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: Count | None = None
    temperature: Temperature | None = Field(
        None, description="0 is greedy; higher values sample; default: 1"
    )
    top_p: Probability | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: Literal[False] | None = Field(None, description="only false")
    truncation: Literal["disabled"] | None = Field(None, description="only disabled")
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = (
        Field(None, description="no effect: reasoning is part of the text")
    )
    reuse: ReuseMode | None = Field(None, description=REUSE)
    documents: Documents | None = Field(None, description=DOCUMENTS)
    order: DocumentOrder | None = Field(None, description=ORDER)
    chat_template_kwargs: TemplateKwargs | None = Field(None, description=TEMPLATE)
    _chat: ChatBody = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> ResponsesBody:
        self._chat = as_chat(
            ResponseChat,
            CHAT_NAMES,
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=[_nested(tool) for tool in self.tools or ()] or None,
            tool_choice=_nested(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._format(),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            stream=self.stream,
            reuse=self.reuse,
            documents=self.documents,
            order=self.order,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return self

    @property
    def chat(self) -> ChatBody:
        """The same as a chat."""
        return self._chat

    def _messages(self) -> list[Json]:
        said: list[Json] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, InputMessage):
                said.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, InputResult):
                output = _text(item.output)
                said.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            else:  # a call belongs to the message before it
                if not said or said[-1]["role"] != "assistant":
                    said.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                said[-1].setdefault("tool_calls", []).append(call)
        return said

    def _format(self) -> Json | None:
        given = self.text.format if self.text else None
        if given is None:
            return None
        if not isinstance(given, FlatSchemaFormat):
            return given.model_dump()
        schema = given.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}


def _nested(tool: FunctionTool | FunctionChoice | str | None) -> Any:
    """A tool as chats name it."""
    if tool is None or isinstance(tool, str):
        return tool
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
