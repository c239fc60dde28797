"""The text of a request to an OpenAI-compatible server, without its template."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvboost.routing.anchors import SEPARATOR


def text_of(request: object) -> bytes:
    """The text of a prompt as UTF-8, its parts separated by `anchors.SEPARATOR`; never raises.

    `request` is a parsed body, or an object with `messages`, `prompt` or, for the Responses API,
    `instructions` and `input`; of others nothing is known. Token ids give their bytes,
    little-endian u32.
    """
    tools = _field(request, "tools")
    parts = [_schema(tool) for tool in tools] if isinstance(tools, list) else []
    parts.extend(_texts(_field(request, "instructions")))
    lists = (_field(request, name) for name in ("messages", "input"))
    items = next((each for each in lists if isinstance(each, list | tuple)), None)
    if items is None:
        parts.extend(_texts(_field(request, "prompt")))
        parts.extend(_texts(_field(request, "input")))
    else:
        for item in items:
            for name in ("content", "arguments", "output"):
                parts.extend(_texts(_field(item, name)))
            parts.extend(_calls(_field(item, "tool_calls")))
    return SEPARATOR.join(part for part in parts if part)


def _field(owner: object, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _texts(content: Any) -> Iterator[bytes]:
    # No other iterables: pydantic leaves some that can be read once, and the engine has to.
    is_list = isinstance(content, list | tuple)
    is_one = not is_list or all(type(part) is int for part in content)
    for part in [content] if is_one else content:
        if isinstance(part, list | tuple):
            yield _token_bytes(part)
        else:
            text = part if isinstance(part, str) else _field(part, "text")
            yield text.encode(errors="replace") if isinstance(text, str) else b""


def _token_bytes(tokens: Sequence[object]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        return b""


def _calls(calls: object) -> Iterator[bytes]:
    """The arguments of calls that an earlier answer made."""
    for call in calls if isinstance(calls, list | tuple) else ():
        yield from _texts(_field(_field(call, "function"), "arguments"))


def _schema(tool: object) -> bytes:
    """A tool as most templates write it: keys in the order of the request."""
    if hasattr(tool, "model_dump"):
        tool = tool.model_dump(exclude_unset=True)
    try:
        return json.dumps(tool, ensure_ascii=False).encode(errors="replace")
    except (TypeError, ValueError, RecursionError):
        return b""
