"""Tool calls: tools in the prompt, and calls parsed from the output."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from jinja2 import TemplateError

from kvboost.errors import ConfigError
from kvboost.server.messages import NAME

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Message: TypeAlias = Mapping[str, Any]

# The convention of Hermes and Qwen templates, the most common one.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Some models leave the tags out, Qwen2.5-Coder nearly always: the whole answer is the call then.
BARE = ('{"name":', '```json{"name":')

DESCRIPTION = """\
You may call functions. They are described here, one JSON object in a line:
{tools}

To call a function, write its name and its arguments as JSON between tags:
<tool_call>
{{"name": "the name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The result comes back between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written."""

    name: str
    arguments: str  # a JSON object
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}", compare=False)


@dataclass(frozen=True)
class Prepared:
    """What the chat template is rendered with."""

    messages: list[dict[str, Any]]
    arguments: dict[str, Any]  # for `apply_chat_template`


def prepare(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: object,
    tokenizer: PreTrainedTokenizerBase,
) -> Prepared:
    """Messages and template arguments that show a model its tools, past calls and their results.

    Raises:
        ConfigError: a past call has arguments that are not a JSON object.
    """
    shown = list(tools or ()) if tool_choice != "none" else []
    read = [_with_arguments(message) for message in messages]
    if not shown and not any(_is_about_calls(message) for message in read):
        return Prepared(read, {})
    if knows_tools(tokenizer):
        return Prepared(read, {"tools": shown} if shown else {})
    plain = _without_calls(read)
    if shown:
        text = DESCRIPTION.format(tools="\n".join(json.dumps(tool["function"]) for tool in shown))
        if plain and plain[0]["role"] == "system":
            text = f"{plain.pop(0)['content']}\n\n{text}"
        plain.insert(0, {"role": "system", "content": text})
    return Prepared(plain, {})


def knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template shows tools, calls as we read them, and results."""
    call = {"name": "probed_name", "arguments": {"probed_key": "probed value"}}
    messages = [
        {"role": "user", "content": "a question"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "probed result"},
    ]
    parameters = {"type": "object", "properties": {"probed_key": {"type": "string"}}}
    function = {"name": "probed_name", "description": "probed use", "parameters": parameters}
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, tools=[{"type": "function", "function": function}]
        )
    except (LookupError, TemplateError, TypeError, ValueError):
        return False
    reader = ToolReader()
    found = [*reader.feed(text), *reader.finish()]
    return (
        ToolCall("probed_name", '{"probed_key": "probed value"}') in found
        and "probed use" in text
        and "probed result" in text
    )


class ToolReader:
    """Streamed text -> pieces of plain text, and calls once they are complete.

    However the text is cut into pieces, the same calls come with the same text between them. What
    looks like a call and is none is text. Blanks beside calls belong to them. An answer that is
    nothing but the JSON of a call is one, too.
    """

    def __init__(self) -> None:
        self._held = ""  # not yet emitted: it may be a call, or its beginning
        self._may_be_bare = True  # whether the answer as a whole may be a call
        self._checked = 0  # closing tags before this offset of the held text are inside a string
        self._was_call = False  # whether the last item emitted was a call

    def feed(self, text: str) -> list[str | ToolCall]:
        """Add text; returns what is now certain."""
        self._held += text
        self._may_be_bare = self._may_be_bare and _is_bare(self._held)
        found: list[str | ToolCall] = []
        while not self._may_be_bare and self._step(found):
            pass
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest; a call that lacks only its closing tag counts."""
        if self._may_be_bare:
            call = _call_of(self._held.strip().removeprefix("```json").removesuffix("```"))
            if call is not None:
                return [call]
        self._may_be_bare = False
        found, rest = self.feed(""), self._held
        start = rest.find(OPEN)
        call = _call_of(rest[start + len(OPEN) :]) if start >= 0 else None
        if call is not None:
            return [*found, call]
        return [*found, rest] if rest.strip() or (rest and not self._was_call) else found

    def _step(self, found: list[str | ToolCall]) -> bool:
        """Emit one text or call; False if more input is needed first."""
        start = self._held.find(OPEN)
        text_stop = _start_of_call(self._held) if start < 0 else len(self._held[:start].rstrip())
        if text_stop > 0:
            self._give_text(text_stop, found)
            return start >= 0
        body = start + len(OPEN)
        stop = self._held.find(CLOSE, max(body, self._checked)) if start >= 0 else -1
        if stop < 0:
            return False
        if _is_in_string(self._held[body:stop]):
            self._checked = stop + 1
            return True
        call = _call_of(self._held[body:stop])
        if call is None:
            self._give_text(self._held.find(CLOSE) + len(CLOSE), found)
        else:
            found.append(call)
            self._cut(stop + len(CLOSE), is_call=True)
        return True

    def _give_text(self, stop: int, found: list[str | ToolCall]) -> None:
        found.append(self._held[:stop])
        self._cut(stop, is_call=False)

    def _cut(self, stop: int, *, is_call: bool) -> None:
        self._held, self._checked, self._was_call = self._held[stop:], 0, is_call


def _is_bare(text: str) -> bool:
    compact = "".join(text[:200].split())
    return any(head.startswith(compact) or compact.startswith(head) for head in BARE)


def _start_of_call(text: str) -> int:
    """Index from which the end of a text may begin a call, blanks before it included."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())


def _is_in_string(text: str) -> bool:
    """Whether the JSON ends in a string that is still open: what follows belongs to it."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error).startswith("Unterminated string")
    return False


def _call_of(text: str) -> ToolCall | None:
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name, given = call.get("name"), call.get("arguments")
    if not (isinstance(name, str) and re.fullmatch(NAME, name) and isinstance(given, dict)):
        return None
    arguments = json.dumps(given, ensure_ascii=False)
    try:
        arguments.encode()
    except UnicodeEncodeError:  # half a surrogate pair: it can be sent as an escape only
        arguments = json.dumps(given)
    return ToolCall(name, arguments)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_about_calls(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _with_arguments(message: Message) -> dict[str, Any]:
    """A message as templates want it: text, and arguments as objects, not as their JSON."""
    read = {**message, "content": message.get("content") or ""}
    if read.get("tool_calls"):
        read["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments_of(call)}}
            for call in read["tool_calls"]
        ]
    return read


def _arguments_of(call: Mapping[str, Any]) -> Any:
    arguments = call["function"].get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        name = call["function"]["name"]
        raise ConfigError(f"tool call of {name}: the arguments must be a JSON object")
    return arguments


def _without_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same as plain messages; results that follow each other are one, as turns alternate."""
    plain: list[dict[str, Any]] = []
    was_tool = False
    for message in messages:
        text, is_tool = str(message["content"]), message["role"] == "tool"
        if is_tool:
            text = f"<tool_response>\n{text}\n</tool_response>"
        calls = [_written(call["function"]) for call in message.get("tool_calls") or ()]
        if calls:
            text = "\n".join([text, *calls]).lstrip()
        if is_tool and was_tool:
            plain[-1]["content"] += f"\n{text}"
        else:
            plain.append({"role": "user" if is_tool else message["role"], "content": text})
        was_tool = is_tool
    return plain


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
