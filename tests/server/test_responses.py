"""OpenAI's Responses API, with the official client and an engine that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from starlette.testclient import TestClient

from asking import CALL
from fake_serving import Stand
from kvboost.errors import KVBoostError

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
OPENING = ["response.created", "response.in_progress"]
TEXT_BEGINS = ["response.output_item.added", "response.content_part.added"]
TEXT_ENDS = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALLED = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@pytest.fixture
def ai(client: TestClient) -> Iterator[OpenAI]:
    yield OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client)


def ask(ai: OpenAI, **given: Any) -> Any:
    answer = ai.responses.create(**({"model": "fake", "input": "hi"} | given))
    if not given.get("stream"):
        Response.model_validate(answer.model_dump(by_alias=True))
    return answer


def streamed(ai: OpenAI, **given: Any) -> list[Any]:
    events = list(ask(ai, stream=True, **given))
    for number, event in enumerate(events):
        assert event.sequence_number == number
        EVENT.validate_python(event.model_dump(by_alias=True))
    return events


def kinds(events: list[Any]) -> list[str]:
    return [event.type for event in events]


def refusal(ai: OpenAI, **given: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as error:
        ask(ai, **given)
    return error.value


def test_a_text_is_answered_in_openais_shape(ai: OpenAI, stand: Stand) -> None:
    answer = ask(ai, instructions="be kind", max_output_tokens=5, temperature=0.5, top_p=0.9)
    assert answer.output_text == "Hello world"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.store, answer.temperature, answer.max_output_tokens) == (False, 0.5, 5)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (23, 3)
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.total_tokens == 26
    assert answer.kvboost["prompts"][0]["exact_tokens"] == 4
    assert bytes(stand.engine.calls[0]["prompt"]) == b"<system>be kind<user>hi"
    sampling = stand.engine.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)


def test_a_cut_answer_is_incomplete(ai: OpenAI, stand: Stand) -> None:
    answer = ask(ai, max_output_tokens=2)
    assert (answer.status, answer.output_text) == ("incomplete", "Hello")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    events = streamed(ai, max_output_tokens=2)
    assert events[-1].type == "response.incomplete"
    assert stand.telemetry.records[-1].finish_reason == "length"


def test_an_answer_without_a_word_is_an_empty_message(ai: OpenAI, stand: Stand) -> None:
    stand.engine.pieces = [""]
    assert ask(ai).output[0].content[0].text == ""
    events = streamed(ai)
    assert kinds(events) == [*OPENING, *TEXT_BEGINS, *TEXT_ENDS, "response.completed"]


def test_a_streamed_text_has_openais_events(ai: OpenAI) -> None:
    events = streamed(ai)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds(events) == [
        *OPENING,
        *TEXT_BEGINS,
        *kinds(deltas),
        *TEXT_ENDS,
        "response.completed",
    ]
    assert "".join(event.delta for event in deltas) == "Hello world"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    whole = events[-1].response
    assert whole.output_text == "Hello world"
    assert whole.usage.output_tokens == 3
    assert {event.item_id for event in deltas} == {whole.output[0].id}
    assert {event.response.id for event in (*events[:2], events[-1])} == {whole.id}


def test_calls_of_functions_are_items(ai: OpenAI, stand: Stand) -> None:
    stand.engine.pieces = ["Let me see. ", CALL[:20], CALL[20:], CALL]
    answer = ask(ai, tools=[WEATHER], tool_choice="auto")
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text.strip() == "Let me see."
    call = answer.output[1]
    assert (call.name, call.status) == ("weather", "completed")
    assert json.loads(call.arguments) == {"city": "Rome"}
    assert stand.telemetry.records[-1].finish_reason == "tool_calls"
    one = ask(ai, tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]


def test_calls_of_functions_are_streamed(ai: OpenAI, stand: Stand) -> None:
    stand.engine.pieces = ["See.", CALL, " Done."]
    events = streamed(ai, tools=[WEATHER])
    delta = ["response.output_text.delta"]
    text = [*TEXT_BEGINS, *delta, *TEXT_ENDS]
    assert kinds(events) == [*OPENING, *text, *CALLED, *text, "response.completed"]
    items = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in items] == [0, 1, 2]
    assert [event.item.to_dict() for event in items] == [
        item.to_dict() for item in events[-1].response.output
    ]
    with ai.responses.stream(model="fake", input="hi", tools=[WEATHER]) as stream:
        stream.until_done()
        assert stream.get_final_response().output[1].name == "weather"


def test_a_conversation_with_calls_is_read_back(ai: OpenAI, stand: Stand) -> None:
    stand.engine.pieces = ["See.", CALL, CALL]
    first = ask(ai, tools=[WEATHER])
    outputs = ["sun", [{"type": "input_text", "text": "rain"}]]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item, output in zip(first.output[1:], outputs, strict=True)
    ]
    said = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": said},
    ]
    ask(ai, input=[*messages, *first.output, *results], tools=[WEATHER])
    prompt = bytes(stand.engine.calls[-1]["prompt"]).decode()
    asked, _, told = prompt.partition("<assistant>")
    assert asked.endswith("<user>a\nb")
    assert told.startswith("See.\n<tool_call>") and told.count("<tool_call>") == 2
    assert told.index("sun") < told.index("rain")


def test_the_form_of_the_text_becomes_a_grammar(ai: OpenAI, stand: Stand) -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = ask(ai, text={"format": form})
    assert stand.engine.sampling.grammar == ("schema", schema)
    assert answer.text.format.schema_ == schema
    ask(ai, text={"format": {"type": "json_object"}})
    assert stand.engine.sampling.grammar == ("schema", None)
    ask(ai, text={"format": {"type": "text"}})
    assert stand.engine.sampling.grammar is None
    ask(ai, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert stand.engine.sampling.grammar == ("tool", ["weather"], "weather")
    ask(ai, tools=[WEATHER], tool_choice="required")
    assert stand.engine.sampling.grammar == ("tool", ["weather"], None)


def test_the_client_parses_what_a_schema_forms(ai: OpenAI, stand: Stand) -> None:
    class Person(BaseModel):
        name: str

    stand.engine.pieces = ['{"name":', ' "Ada"}']
    parsed = ai.responses.parse(model="fake", input="hi", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada")


def test_efforts_and_variables_reach_the_template(ai: OpenAI, stand: Stand) -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(ai, reasoning={"effort": "low"}, extra_body=variables)
    assert stand.engine.tokenizer.rendered["reasoning_effort"] == "low"
    assert stand.engine.tokenizer.rendered["enable_thinking"] is False
    assert answer.reasoning.effort == "low"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
    ],
)
def test_state_is_refused_with_the_reason(ai: OpenAI, given: Any, param: str) -> None:
    error = refusal(ai, **given)
    assert (error.param, error.code) == (param, "invalid_value")
    assert "keeps no state" in error.message


def test_without_state_a_client_may_say_so(ai: OpenAI) -> None:
    answer = ask(ai, store=False, background=False, truncation="disabled", metadata={"a": "b"})
    assert (answer.store, answer.metadata) == (False, {"a": "b"})


PICTURE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": ""}, "input", "at least 1"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]", "expected a message"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "system"),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0]", "text only"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "x",
        ),
        ({"tools": [WEATHER], "text": {"format": {"type": "json_object"}}}, "text", "exclude"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "limit"),
        ({"top_logprobs": 2}, "top_logprobs", "chat/completions"),
        ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "tools"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    ai: OpenAI, stand: Stand, given: Any, param: str, told: str
) -> None:
    error = refusal(ai, **given)
    assert (error.param, told in error.message) == (param, True), error.message
    assert stand.engine.calls == []


def test_another_model_is_not_found(ai: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        ask(ai, model="gpt-4o")


def test_a_fault_within_a_stream_is_a_failed_response(ai: OpenAI, stand: Stand) -> None:
    stand.engine.fault = KVBoostError("the engine is closed")
    events = streamed(ai)
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.message) == ("failed", "the engine is closed")
    assert stand.telemetry.records[-1].error == "unavailable"
