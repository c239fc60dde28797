"""The text of a request: whatever its form, and never an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.routing.anchors import SEPARATOR
from kvboost.routing.prompts import text_of

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": "ü"}}}
TOOL_TEXT = (
    '{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": "ü"}}}'
)


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        ({"prompt": "one"}, [b"one"]),
        ({"prompt": ["one", "two"]}, [b"one", b"two"]),
        ({"prompt": [1, 258]}, [b"\1\0\0\0\2\1\0\0"]),
        ({"prompt": [[1], [2]]}, [b"\1\0\0\0", b"\2\0\0\0"]),
        ({"messages": [{"role": "user", "content": "grüß"}]}, ["grüß".encode()]),
        (
            {
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
                    {"role": "assistant", "content": None},
                ]
            },
            [b"be brief", b"a"],
        ),
        (
            {"messages": [{"tool_calls": [{"function": {"arguments": '{"city": "Ulm"}'}}]}]},
            [b'{"city": "Ulm"}'],
        ),
        ({"tools": [TOOL], "prompt": "one"}, [TOOL_TEXT.encode(), b"one"]),
        ({"prompt": "\ud800x"}, [b"?x"]),
        ({"instructions": "be brief", "input": "one"}, [b"be brief", b"one"]),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                    {"type": "function_call", "arguments": '{"city": "Ulm"}'},
                    {"type": "function_call_output", "output": "rain"},
                ]
            },
            [b"weather?", b'{"city": "Ulm"}', b"rain"],
        ),
    ],
)
def test_the_text_is_found(request_: dict[str, Any], parts: list[bytes]) -> None:
    assert text_of(request_) == SEPARATOR.join(parts)
    assert text_of(SimpleNamespace(**request_)) == SEPARATOR.join(parts)


def test_parts_and_tools_may_be_objects() -> None:
    tool = SimpleNamespace(model_dump=lambda exclude_unset: TOOL)
    message = SimpleNamespace(content=[SimpleNamespace(text="one")])
    request = SimpleNamespace(messages=[message], tools=[tool])
    assert text_of(request) == SEPARATOR.join([TOOL_TEXT.encode(), b"one"])


def test_what_can_be_read_once_is_left_to_the_engine() -> None:
    content = iter([{"text": "one"}])
    assert text_of({"messages": [{"content": content}]}) == b""
    assert list(content) == [{"text": "one"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["content", "text", "function", "tool_calls"]), inner)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON, JSON, JSON)
def test_nothing_is_an_error(messages: object, prompt: object, tools: object) -> None:
    assert isinstance(text_of({"messages": messages, "tools": tools}), bytes)
    assert isinstance(text_of({"prompt": prompt, "tools": {1, 2}}), bytes)
    assert isinstance(text_of({"input": messages, "instructions": prompt}), bytes)
    assert isinstance(text_of(prompt), bytes)


@pytest.mark.parametrize("prompt", [[-1], [2**32], [[1], ["a"]], [[[1]]], [True], 3, object()])
def test_wrong_prompts_have_no_text_of_their_own(prompt: object) -> None:
    assert text_of({"prompt": prompt}).replace(SEPARATOR, b"") in (b"", b"\1\0\0\0")


def test_tools_that_refer_to_themselves_are_left_out() -> None:
    tool: dict[str, Any] = {}
    tool["tool"] = tool
    assert text_of({"tools": [tool], "prompt": "one"}) == b"one"
