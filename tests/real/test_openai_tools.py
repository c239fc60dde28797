"""Tool calls and structured output with the official client and real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from servers import kvboost_server

pytestmark = [pytest.mark.model, pytest.mark.servers]


def weather_tool(city: dict[str, Any], **more: Any) -> dict[str, Any]:
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters = {
        "type": "object",
        "properties": {"city": city, "unit": unit},
        "required": ["city", "unit"],
        **more,
    }
    function = {"name": "get_weather", "description": "The weather in a city now."}
    return {"type": "function", "function": function | {"parameters": parameters}}


WEATHER = weather_tool({"type": "string"})
# A small model that is forced rambles where it may.
BOUNDED_WEATHER = weather_tool({"type": "string", "maxLength": 12}, additionalProperties=False)
CLOCK = {"type": "function", "function": {"name": "get_time", "description": "The time now."}}
QUESTION = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool
    degrees: int


@pytest.fixture(scope="module")
def coder_client(coder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model that was trained to call tools."""
    log = tmp_path_factory.mktemp("coder") / "log"
    with (
        kvboost_server(coder, log, "--dtype", "float32") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def ask(client: OpenAI, **given: Any) -> Any:
    model = client.models.list().data[0].id
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    return client.chat.completions.create(**(fields | given))


def assert_is_a_call_of_the_weather(choice: Any) -> None:
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_can_be_forced_of_any_model(client: OpenAI, choice: Any) -> None:
    tools = [BOUNDED_WEATHER] if choice == "required" else [CLOCK, BOUNDED_WEATHER]
    answer = ask(client, tools=tools, tool_choice=choice)
    assert_is_a_call_of_the_weather(answer.choices[0])


def test_a_streamed_call_is_that_of_the_whole_answer(client: OpenAI) -> None:
    forced = {"tools": [BOUNDED_WEATHER], "tool_choice": "required"}
    (whole,) = ask(client, **forced).choices[0].message.tool_calls
    choices = [piece.choices[0] for piece in ask(client, stream=True, **forced)]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}
    assert calls[0].id and calls[0].function.name == "get_weather"
    arguments = "".join(call.function.arguments for call in calls)
    assert arguments == whole.function.arguments
    assert choices[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in choices)


def test_a_schema_holds_whatever_the_model_likes(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 9},
            "names": {
                "type": "array",
                "items": {"type": "string", "maxLength": 4},
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["kind", "legs", "names"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    for seed in range(2):  # hot: a free answer would be noise
        answer = ask(client, response_format=wanted, temperature=2, seed=seed, max_tokens=200)
        assert answer.choices[0].finish_reason == "stop"
        animal = json.loads(answer.choices[0].message.content)
        assert animal["kind"] in ("cat", "dog")
        assert animal["legs"] in range(10)
        assert len(animal["names"]) == 2
    pieces = ask(client, response_format=wanted, max_tokens=200, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert set(json.loads(text)) == {"kind", "legs", "names"}


def test_a_pydantic_model_is_parsed_by_the_client(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    parsed = client.chat.completions.parse(**fields, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_a_pydantic_tool_is_parsed_by_the_client(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    tools = [pydantic_function_tool(Weather)]
    parsed = client.chat.completions.parse(**fields, tools=tools, tool_choice="required")
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_model_that_knows_tools_calls_one_by_itself_and_reads_its_result(
    coder_client: OpenAI,
) -> None:
    first = ask(coder_client, tools=[WEATHER, CLOCK]).choices[0]
    assert_is_a_call_of_the_weather(first)
    (call,) = first.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "celsius"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 31, "sky": "clear"}'}
    messages = [*QUESTION, first.message.model_dump(exclude_none=True), result]
    second = ask(coder_client, tools=[WEATHER, CLOCK], messages=messages).choices[0]
    assert second.finish_reason == "stop"
    assert "31" in second.message.content


def test_a_model_that_knows_tools_answers_without_when_none_is_needed(
    coder_client: OpenAI,
) -> None:
    greeting = [{"role": "user", "content": "Hello! Who are you?"}]
    choice = ask(coder_client, tools=[CLOCK], messages=greeting).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_of_a_model_that_knows_tools_is_about_the_question(
    coder_client: OpenAI, choice: Any
) -> None:
    answer = ask(coder_client, tools=[WEATHER], tool_choice=choice).choices[0]
    assert_is_a_call_of_the_weather(answer)
    assert "Paris" in answer.message.tool_calls[0].function.arguments


def test_any_json_object_can_be_asked_for(coder_client: OpenAI) -> None:
    question = [{"role": "user", "content": "What is 2 + 2? Answer as JSON with the key answer."}]
    answer = ask(coder_client, messages=question, response_format={"type": "json_object"})
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content) == {"answer": 4}
