"""OpenAI's Responses API with the official client and a real model; every event is validated."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

pytestmark = [pytest.mark.model, pytest.mark.servers]

EVENT = TypeAdapter(ResponseStreamEvent)
QUESTION = "What is the weather in Paris, in celsius?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city now.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


def ask(client: OpenAI, model: str, **given: Any) -> Any:
    fields = {"model": model, "input": "Name three colours of the rainbow.", "temperature": 0}
    answer = client.responses.create(**(fields | {"max_output_tokens": 24} | given))
    if not given.get("stream"):
        Response.model_validate(answer.model_dump(by_alias=True))
    return answer


def events_of(client: OpenAI, model: str, **given: Any) -> list[Any]:
    events = list(ask(client, model, stream=True, **given))
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True))
    return events


def test_a_text_is_answered_as_the_chat_answers_it(client: OpenAI, model: str) -> None:
    answer = ask(client, model, instructions="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name three colours of the rainbow."},
    ]
    chat = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=24
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, model: str) -> None:
    whole = ask(client, model)
    events = events_of(client, model)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 1
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text
    details = events[-1].response.usage.input_tokens_details
    assert details.cached_tokens > 0  # of the whole answer before


def test_a_function_is_called_and_its_result_read(client: OpenAI, model: str) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 80}
    first = ask(client, model, input=QUESTION, **forced)
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", "get_weather", "completed")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    events = events_of(client, model, input=QUESTION, **forced)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[4].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    asked = [{"role": "user", "content": QUESTION}, *first.output, result]
    second = ask(client, model, input=asked, tools=[WEATHER], tool_choice="none")
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens - 100


def test_a_schema_holds_and_is_parsed(client: OpenAI, model: str) -> None:
    fields = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 80}
    parsed = client.responses.parse(**fields, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**fields, text_format=Weather) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == parsed.output_parsed
