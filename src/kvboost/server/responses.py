"""OpenAI's Responses API: its requests become chats, and what a chat sends becomes its events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from kvboost.core import ReuseMode
from kvboost.engine.results import Completion, Delta
from kvboost.server.bodies import (
    DOCUMENTS,
    EFFORT,
    MODEL,
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
    only_text,
    without_nulls,
)
from kvboost.server.replies import Json, Reply, event

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
    list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
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
        """The name under which the client has bounded the answer."""
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


class ResponseReply(Reply):
    """The shape of /v1/responses, made of what a chat sends."""

    def __init__(self, chat: Reply, body: ResponsesBody) -> None:
        super().__init__(chat.model)
        self._chat = chat
        self._head = _head(chat.model, body)
        self._status = "in_progress"
        self._output: list[Json] = []  # items that are complete
        self._message: Json | None = None  # the item that is being written
        self._num_events = 0

    def whole(self, kept: Sequence[tuple[int, Completion]], account: Json) -> Json:
        """What the last event of a stream would hold."""
        ((index, answer),) = kept
        pieces = self._chat.piece(index, Delta(answer.text, answer.token_ids))
        for choice in (*pieces, *self._chat.ending(index, answer)):
            list(self._take(choice))
        return self._response(account)

    def begin(self, num_answers: int) -> Iterator[bytes]:
        """An empty response, twice as OpenAI has it."""
        for kind in ("created", "in_progress"):
            yield _sent(self._event(kind, response=self._response()))

    def piece(self, index: int, delta: Delta) -> Iterator[Json]:
        """The chat's."""
        return self._chat.piece(index, delta)

    def ending(self, index: int, answer: Completion) -> Iterator[Json]:
        """The chat's."""
        return self._chat.ending(index, answer)

    def finish_reason(self, index: int, answer: Completion) -> str:
        """The chat's."""
        return self._chat.finish_reason(index, answer)

    def events(self, choice: Json) -> Iterator[bytes]:
        """The steps by which items grow."""
        return map(_sent, self._take(choice))

    def end(self, account: Json) -> Iterator[bytes]:
        """The whole response."""
        yield _sent(self._event(self._status, response=self._response(account)))

    def fail(self, error: Json) -> bytes:
        """The response so far, and what went wrong."""
        self._status = "failed"
        shown = {"code": "server_error", "message": error["error"]["message"]}
        return _sent(self._event("failed", response={**self._response(), "error": shown}))

    def _take(self, choice: Json) -> Iterator[Json]:
        delta, reason = choice["delta"], choice["finish_reason"]
        if delta.get("content"):
            yield from self._write(delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._close("completed")
            yield from self._call(call)
        if reason is not None:
            self._status = "incomplete" if reason == "length" else "completed"
            if not self._output:  # an answer without a word is an empty message
                yield from self._open()
            yield from self._close(self._status)

    def _open(self) -> Iterator[Json]:
        if self._message is None:
            self._message = {
                "id": _id("msg"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            yield self._event("output_item.added", item=self._message)
            part = _part()
            yield self._event("content_part.added", **self._place, content_index=0, part=part)
            self._message["content"].append(part)

    def _write(self, text: str) -> Iterator[Json]:
        yield from self._open()
        assert self._message is not None
        self._message["content"][0]["text"] += text
        place = {**self._place, "content_index": 0}
        yield self._event("output_text.delta", **place, delta=text, logprobs=[])

    def _close(self, status: str) -> Iterator[Json]:
        if self._message is None:
            return
        item = {**self._message, "status": status}
        (part,) = item["content"]
        place = {**self._place, "content_index": 0}
        yield self._event("output_text.done", **place, text=part["text"], logprobs=[])
        yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", item=item)
        self._output.append(item)
        self._message = None

    def _call(self, call: Json) -> Iterator[Json]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": name,
            "arguments": "",
        }
        yield self._event("output_item.added", item=item)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        whole = {**place, "name": name, "arguments": arguments}
        yield self._event("function_call_arguments.done", **whole)
        item = {**item, "status": "completed", "arguments": arguments}
        yield self._event("output_item.done", item=item)
        self._output.append(item)

    @property
    def _place(self) -> Json:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self._output)}

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        if "item" in fields:
            fields["output_index"] = len(self._output)
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _response(self, account: Json | None = None) -> Json:
        is_cut = self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": None if account is None else _usage(account["usage"]),
            "kvboost": None if account is None else account["kvboost"],
        }


def _head(model: str, body: ResponsesBody) -> Json:
    """What a response says of its request."""
    given = body.text.format if body.text else None
    effort = body.reasoning.effort if body.reasoning else None
    choice = body.tool_choice or "auto"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": given.model_dump(by_alias=True) if given else {"type": "text"}},
        "reasoning": {"effort": effort, "summary": None},
        "metadata": body.metadata or {},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }


def _usage(usage: Json) -> Json:
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        # What a request adds to the cache is not counted by request.
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _nested(tool: FunctionTool | FunctionChoice | str | None) -> Any:
    """A tool as chats name it."""
    if tool is None or isinstance(tool, str):
        return tool
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _part() -> Json:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _sent(data: Json) -> bytes:
    return event(data, data["type"])


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
