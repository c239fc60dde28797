"""The endpoints, with an engine that says what it is told to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from fake_serving import Stand
from kvboost.errors import KVBoostError
from kvboost.server import exchange
from kvboost.server.bodies import ChatBody, CompletionBody

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
CALLED = {"name": "weather", "arguments": "{}"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def client(stand: Stand) -> Iterator[TestClient]:
    yield client_of(stand)


def client_of(stand: Stand) -> TestClient:
    return TestClient(stand.app, base_url="http://localhost", raise_server_exceptions=False)


def chat(client: TestClient, **body: Any) -> Any:
    reply = client.post(CHAT, json={"messages": USER, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(client: TestClient, **body: Any) -> Any:
    reply = client.post(COMPLETIONS, json={"prompt": "hi", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: TestClient, path: str = CHAT, status: int = 400, **body: Any) -> Any:
    given = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    reply = client.post(path, json=given | body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def streamed(client: TestClient, path: str, **body: Any) -> list[Any]:
    given = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    reply = client.post(path, json={**given, "stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)


def test_a_chat_is_answered_in_openais_shape(client: TestClient, stand: Stand) -> None:
    body = chat(client, model="fake")
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert body["kvboost"]["prompts"][0]["exact_tokens"] == 4
    assert bytes(stand.engine.calls[0]["prompt"]) == b"<user>hi"


def test_headers_tell_of_reuse_and_carry_the_request_id(client: TestClient) -> None:
    given = {"x-request-id": "my-id.1"}
    reply = client.post(COMPLETIONS, json={"prompt": "hi"}, headers=given)
    assert reply.headers["x-request-id"] == "my-id.1"
    assert reply.headers["x-kvboost-cached-tokens"] == "4"
    assert reply.headers["x-kvboost-queue-ms"] == "2.0"
    strange = client.get("/health", headers={"x-request-id": "no good\t"})
    assert strange.headers["x-request-id"].startswith("req-")


def test_a_wrong_method_is_told_the_right_ones(client: TestClient) -> None:
    reply = client.get(CHAT)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", [b"hi"]),
        (["hi", "you"], [b"hi", b"you"]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [106]], [b"hi", b"j"]),
    ],
)
def test_prompts_come_in_four_forms(
    client: TestClient, stand: Stand, prompt: Any, tokens: list[bytes]
) -> None:
    body = complete(client, prompt=prompt)
    assert [bytes(call["prompt"]) for call in stand.engine.calls] == tokens
    assert [choice["index"] for choice in body["choices"]] == list(range(len(tokens)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({}, "temperature", 1.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 7}, "top_k", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": 5}, "seed", 5),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"presence_penalty": 1}, "presence_penalty", 1.0),
        ({"frequency_penalty": -1}, "frequency_penalty", -1.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"logit_bias": {"7": -100}}, "logit_bias", {7: -100.0}),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"max_tokens": 2}, "max_new_tokens", 2),
        ({"temperature": None, "stop": None, "n": None, "seed": None}, "stop", ()),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_parameter_reaches_the_engine(
    client: TestClient, stand: Stand, path: str, given: Any, name: str, value: Any
) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    assert client.post(path, json=body | given).status_code == 200
    assert getattr(stand.engine.sampling, name) == value


def test_limits_of_answers_have_defaults(client: TestClient, stand: Stand) -> None:
    complete(client)
    assert stand.engine.sampling.max_new_tokens == 16
    chat(client)
    assert stand.engine.sampling.max_new_tokens == 1000 - 8  # the context less the prompt
    chat(client, max_completion_tokens=3)
    assert stand.engine.sampling.max_new_tokens == 3


def test_reuse_and_documents_reach_the_engine(client: TestClient, stand: Stand) -> None:
    complete(client, reuse="off", documents=["i"])
    assert stand.engine.calls[-1]["reuse"] == "off"
    assert (
        refusal(client, documents=["zebra"])["message"] == "documents[0] is not part of the prompt"
    )


def test_several_answers_have_seeds_of_their_own(client: TestClient, stand: Stand) -> None:
    body = chat(client, n=3, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [call["sampling"].seed for call in stand.engine.calls] == [5, 6, 7]
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["completion_tokens"] == 9


def test_the_best_of_several_is_returned(client: TestClient, stand: Stand) -> None:
    body = complete(client, best_of=3, n=1)
    assert len(stand.engine.calls) == 3
    assert len(body["choices"]) == 1
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 9


def test_an_echo_stands_before_the_answer(client: TestClient) -> None:
    assert complete(client, echo=True)["choices"][0]["text"] == "hiHello world"
    assert complete(client, echo=True, prompt=[106])["choices"][0]["text"] == "jHello world"
    parts = streamed(client, COMPLETIONS, echo=True)[:-1]
    assert "".join(part["choices"][0]["text"] for part in parts) == "hiHello world"


def test_logprobs_of_a_chat_have_openais_shape(client: TestClient) -> None:
    content = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == ["Hel", "lo", " world"]
    assert content[0]["bytes"] == list(b"Hel")
    assert [each["logprob"] for each in content[0]["top_logprobs"]] == [-0.25, -9999.0]


def test_logprobs_of_a_completion_have_openais_shape(client: TestClient) -> None:
    logprobs = complete(client, logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hel", "lo", " world"]
    assert logprobs["text_offset"] == [0, 3, 5]
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "Hel": -1.5}  # the chosen one as well
    parts = streamed(client, COMPLETIONS, logprobs=1)[:-1]
    said = [part["choices"][0]["logprobs"] for part in parts]
    assert [at for each in said if each for at in each["text_offset"]] == [0, 3, 5]


def test_a_part_of_a_character_has_no_bytes(client: TestClient, stand: Stand) -> None:
    stand.engine.pieces = ["\N{REPLACEMENT CHARACTER}", "é"]
    content = chat(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [None, list("é".encode())]


def test_a_stream_of_a_chat_has_openais_shape(client: TestClient) -> None:
    parts = streamed(client, CHAT, stream_options={"include_usage": True})
    assert parts[-1] == "[DONE]"
    assert parts[0]["object"] == "chat.completion.chunk"
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = [part["choices"][0] for part in parts[:-2]]
    assert "".join(each["delta"].get("content", "") for each in said) == "Hello world"
    assert [each["finish_reason"] for each in said if each["finish_reason"]] == ["stop"]
    assert parts[-2]["choices"] == []
    assert parts[-2]["usage"]["completion_tokens"] == 3
    assert all(part["usage"] is None for part in parts[:-2])
    assert len({part["id"] for part in parts[:-1]}) == 1


def test_several_streamed_answers_keep_apart(client: TestClient) -> None:
    parts = streamed(client, COMPLETIONS, prompt=["a", "b"], n=2)[:-1]
    for index in range(4):
        own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in own) == "Hello world"
        assert own[-1]["finish_reason"] == "stop"
    assert all("usage" not in part for part in parts)


def test_the_forms_of_an_answer_become_grammars(client: TestClient, stand: Stand) -> None:
    schema = {"type": "object", "properties": {}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    chat(client, response_format=named)
    assert stand.engine.sampling.grammar == ("schema", schema)
    chat(client, response_format={"type": "json_object"})
    assert stand.engine.sampling.grammar == ("schema", None)
    chat(client, response_format={"type": "text"})
    assert stand.engine.sampling.grammar is None
    chat(client, tools=[WEATHER], tool_choice="required")
    assert stand.engine.sampling.grammar == ("tool", ["weather"], None)
    choice = {"type": "function", "function": {"name": "weather"}}
    chat(client, tools=[WEATHER], tool_choice=choice)
    assert stand.engine.sampling.grammar == ("tool", ["weather"], "weather")
    impossible = {"name": "x", "schema": {"type": "impossible"}}
    answer = refusal(client, response_format={"type": "json_schema", "json_schema": impossible})
    assert "cannot be compiled" in answer["message"]


def test_calls_of_tools_are_told_apart_from_text(client: TestClient, stand: Stand) -> None:
    stand.engine.pieces = ["Let me see. ", CALL[:20], CALL[20:], CALL]
    choice = chat(client, tools=[WEATHER])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}
    one = chat(client, tools=[WEATHER], parallel_tool_calls=False)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    plain = chat(client, tools=[WEATHER], tool_choice="none")["choices"][0]
    assert "tool_call" in plain["message"]["content"]


def test_calls_of_tools_are_streamed(client: TestClient, stand: Stand) -> None:
    stand.engine.pieces = [CALL[:20], CALL[20:]]
    parts = [part["choices"][0] for part in streamed(client, CHAT, tools=[WEATHER])[:-1]]
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather")]
    assert calls[0]["id"]
    assert parts[-1]["finish_reason"] == "tool_calls"


def test_calls_that_come_at_once_are_numbered(client: TestClient, stand: Stand) -> None:
    stand.engine.pieces = [f"{CALL}\n{CALL}\n", CALL]
    parts = streamed(client, CHAT, tools=[WEATHER])[:-1]
    deltas = [part["choices"][0]["delta"] for part in parts]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1, 2]


def test_messages_come_in_many_forms(client: TestClient, stand: Stand) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "bc"], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    chat(client, messages=messages)
    said = bytes(stand.engine.calls[-1]["prompt"])
    assert said.startswith(b"<system>a<user>b\nc<assistant>")
    assert b"sun" in said.split(b"<assistant>")[1]


def test_harmless_parameters_are_accepted(client: TestClient) -> None:
    chat(
        client,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        modalities=["text"],
        functions=None,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tempereture": 1}, "tempereture"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"reuse": "some"}, "reuse"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_cannot_be_applied_is_refused_by_name(
    client: TestClient, stand: Stand, path: str, body: Any, param: str
) -> None:
    error = refusal(client, path, **body)
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert stand.engine.calls == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [300]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"messages": USER}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        (CHAT, {"messages": [{**USER[0], "mood": "good"}]}, "messages[0].mood"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tools": [{**WEATHER, "type": "x"}]}, "tools[0].type"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    client: TestClient, path: str, body: Any, param: str
) -> None:
    assert refusal(client, path, **body)["param"] == param


def test_a_bias_of_endless_digits_is_refused(client: TestClient) -> None:
    assert refusal(client, logit_bias={"1" * 5000: 1})["param"] == "logit_bias"


@pytest.mark.parametrize(
    "messages",
    [
        USER * 3000,
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 3000}],
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": CALLED}] * 200}],
    ],
)
def test_messages_have_bounds(client: TestClient, messages: Any) -> None:
    assert refusal(client, messages=messages)["param"].startswith("messages")


def test_requests_without_a_schema_do_not_wait_for_those_with_one(
    client: TestClient, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*_: Any) -> Any:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("kvboost.server.plans.Planner.grammars", compiled)
    chat(client, tools=[WEATHER], response_format={"type": "text"}, n=2)
    assert [call["sampling"].grammar for call in stand.engine.calls] == [None, None]


def test_more_than_can_be_prepared_is_503(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.server.app.MOST_QUEUED", 0)
    assert refusal(client, status=503)["code"] == "queue_full"


def test_a_tool_choice_must_name_a_tool(client: TestClient) -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    assert "'other'" in refusal(client, tools=[WEATHER], tool_choice=choice)["message"]


def test_pictures_are_refused(client: TestClient) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refusal(client, messages=[{"role": "user", "content": [part]}])
    assert "'image_url': this model reads text only" in error["message"]


def test_schemas_and_tools_have_a_size(client: TestClient) -> None:
    schema = {"name": "x", "schema": {"description": "x" * 140_000}}
    form = {"type": "json_schema", "json_schema": schema}
    assert refusal(client, response_format=form)["param"] == "response_format"
    tool = {"type": "function", "function": {"name": "x", "description": "x" * 140_000}}
    assert refusal(client, tools=[tool])["param"] == "tools"


def test_prompts_beyond_the_context_are_refused(client: TestClient) -> None:
    error = refusal(client, COMPLETIONS, prompt="x" * 999)
    assert error["code"] == "context_length_exceeded"
    assert "999 tokens and 16 new ones" in error["message"]
    unread = refusal(client, COMPLETIONS, prompt="x" * 2000)  # too many for the longest tokens
    assert unread["code"] == "context_length_exceeded"
    assert "2000 characters" in unread["message"]


def test_prompts_beyond_the_configured_limit_are_refused() -> None:
    client = client_of(Stand(max_prompt_tokens=5))
    assert "at most 5" in refusal(client, COMPLETIONS, prompt="abcdef")["message"]
    complete(client, prompt="abcde")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_body"),
        (b"[]", "invalid_body"),
        (b"null", "invalid_body"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_value"),
        (b'{"prompt": "a", "\\ud800": 1}', "invalid_body"),
        (b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}', "unsupported_value"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_value"),
        (b'{"prompt": "a", "seed": 1e999}', "invalid_value"),
        (b'{"prompt": "a", "n": ' + b"9" * 4000 + b"}", "invalid_value"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "invalid_json"),
    ],
)
def test_broken_bodies_are_refused(client: TestClient, content: bytes, code: str) -> None:
    reply = client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == code


def test_a_body_must_be_sent_as_json(client: TestClient) -> None:
    reply = client.post(
        COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


def test_large_bodies_are_refused_whatever_their_headers_say() -> None:
    stand = Stand(max_body_bytes=1000)
    client = client_of(stand)
    long = b'{"prompt": "' + b"x" * 2000 + b'"}'
    kind = {"content-type": "application/json"}
    for content in (long, iter([long[:500], long[500:]])):
        reply = client.post(COMPLETIONS, content=content, headers=kind)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"
    assert stand.engine.calls == []


def test_other_models_paths_and_methods_are_told(client: TestClient) -> None:
    assert refusal(client, status=404, model="gpt")["code"] == "model_not_found"
    for reply, status in (
        (client.get("/v1/nothing"), 404),
        (client.get("/v1/models/gpt"), 404),
        (client.get(CHAT), 405),
        (client.delete("/v1/cache"), 405),
    ):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_is_503_and_nothing_is_left_of_the_request(
    client: TestClient, stand: Stand
) -> None:
    stand.engine.max_running = 2
    stand.engine.steps.clear()
    reply = client.post(CHAT, json={"messages": USER, "n": 3})
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["code"] == "queue_full"
    assert all(ticket.is_cancelled for ticket in stand.engine.tickets)


def test_a_deadline_counts_from_the_arrival_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(request_deadline_s=100.0)
    given: list[float] = []
    submit = stand.engine.submit

    def noted(*arguments: Any, deadline_s: float, **options: Any) -> Any:
        given.append(deadline_s)
        return submit(*arguments, deadline_s=deadline_s, **options)

    monkeypatch.setattr(stand.engine, "submit", noted)
    for late_s, status in ((60.0, 200), (101.0, 504)):
        monkeypatch.setattr(exchange.Outcome, "elapsed_s", property(lambda _, s=late_s: s))
        assert client_of(stand).post(CHAT, json={"messages": USER}).status_code == status
    assert given == [40.0]


def test_more_answers_than_ever_fit_are_refused_for_good(client: TestClient) -> None:
    reply = client.post("/v1/completions", json={"prompt": ["a"] * 3, "n": 15})
    assert reply.status_code == 400
    assert "45 answers at once: there is room for 40" in reply.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_deadline_is_504_as_long_as_nothing_was_sent(is_stream: bool) -> None:
    stand = Stand(request_deadline_s=0.01)
    stand.engine.steps.clear()
    reply = client_of(stand).post(CHAT, json={"messages": USER, "stream": is_stream})
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"


def test_an_error_within_a_stream_is_an_event(client: TestClient, stand: Stand) -> None:
    stand.engine.fault = KVBoostError("the engine is closed")
    parts = streamed(client, COMPLETIONS)
    assert parts[0]["choices"][0]["text"] == "Hel"
    assert parts[-1]["error"]["message"] == "the engine is closed"
    assert "[DONE]" not in parts
    assert stand.telemetry.records[-1].error == "unavailable"


@pytest.mark.parametrize("is_stream", [False, True])
def test_faults_are_told_without_their_trace(
    client: TestClient, stand: Stand, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    stand.engine.fault = RuntimeError("secret path /home")
    given = {"x-request-id": "r1"}
    body = {"prompt": "hi", "stream": is_stream}
    reply = client.post(COMPLETIONS, json=body, headers=given)
    error = events(reply.text)[-1]["error"] if is_stream else reply.json()["error"]
    assert reply.status_code == (200 if is_stream else 500)
    assert "secret" not in reply.text
    assert error["message"] == "internal error; request id r1"
    assert "secret path" in caplog.text


def test_every_request_is_observed_but_those_of_probes(client: TestClient, stand: Stand) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert client.get(path).status_code == 200
    chat(client)
    refusal(client, n=0)
    streamed(client, COMPLETIONS)
    client.get("/v1/any/where")
    seen = [(each.endpoint, each.status, each.is_stream) for each in stand.telemetry.records]
    assert seen == [
        (CHAT, 200, False), (CHAT, 400, False), (COMPLETIONS, 200, True), ("other", 404, False)
    ]  # fmt: skip
    first, second = stand.telemetry.records[:2]
    assert first.completions[0].text == "Hello world"
    assert (first.finish_reason, second.error) == ("stop", "invalid_value")


def test_models_stats_and_metrics_are_shown(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert client.get("/v1/models/fake").json()["max_model_len"] == 1000
    stats = client.get("/v1/stats").json()
    assert stats["engine"] == {"hot_chunks": 3}
    assert stats["requests"] == {"per_s": 1.0, "num_now": 0}
    assert client.get("/metrics").text == "up 1\n"
    assert client.get("/metrics").headers["content-type"] == "text/plain; version=1"


@pytest.mark.parametrize("path", ["/v1/warm", "/v1/cache/pin", "/v1/cache/delete"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"text": "a" * 1000}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "invalid_value"),
    ],
)
def test_what_could_not_be_a_prompt_is_not_stored_either(
    client: TestClient, stand: Stand, path: str, body: Any, code: str
) -> None:
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert stand.engine.warmed == stand.engine.calls == []


def test_texts_are_warmed(client: TestClient, stand: Stand) -> None:
    reply = client.post("/v1/warm", json={"texts": ["a", "b"], "pin": True, "ttl_s": 5.0})
    assert reply.json()["num_tokens"] == 10
    content, arguments = stand.engine.warmed[0]
    assert content == ["a", "b"]
    assert (arguments["pin"], arguments["ttl_s"], arguments["tenant"]) == (True, 5.0, "")
    assert client.post("/v1/warm", json={"messages": USER}).status_code == 200
    assert bytes(stand.engine.warmed[1][0]) == b"<user>hi"
    for wrong in ({}, {"text": "a", "texts": ["b"]}, {"text": "a", "ttl_s": 5.0}):
        assert client.post("/v1/warm", json=wrong).status_code == 400


def test_the_cache_is_listed_pinned_and_deleted(client: TestClient, stand: Stand) -> None:
    listed = client.get("/v1/cache", params={"tenant": "t", "limit": 1}).json()
    assert listed["data"] == [{"key": "ab", "tenant": "t"}]
    body = {"text": "hi", "ttl_s": 5.0, "tenant": "t"}
    assert client.post("/v1/cache/pin", json=body).json() == {"num_pinned": 2}
    assert stand.engine.calls[-1] == {"pinned": [104, 105], "tenant": "t", "ttl_s": 5.0}
    assert client.post("/v1/cache/delete", json={"everything": True}).json() == {"num_deleted": 3}
    assert stand.engine.calls[-1] == {"deleted": None, "tenant": ""}
    client.post("/v1/cache/delete", json={"messages": USER})
    assert bytes(stand.engine.calls[-1]["deleted"]) == b"<user>hi"
    for path, wrong in (
        ("pin", {"everything": True}), ("delete", {"text": "a", "ttl_s": 1.0}), ("delete", {})
    ):  # fmt: skip
        assert client.post(f"/v1/cache/{path}", json=wrong).status_code == 400


def key_of(name: str, **limits: Any) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "tenant": f"tenant of {name}", "sha256": digest, **limits}


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_keys_decide_who_may_do_what() -> None:
    stand = Stand([key_of("user"), key_of("root", admin=True)], host="0.0.0.0", api_keys="f")
    client = client_of(stand)
    for path in ("/health", "/ready"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/stats", "/v1/cache", "/v1/nothing"):
        for header in ({}, as_("nobody")):
            reply = client.get(path, headers=header)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/v1/models", headers=as_("user")).status_code == 200
    for path in ("/metrics", "/v1/stats", "/v1/cache"):
        assert client.get(path, headers=as_("user")).status_code == 403
        assert client.get(path, headers=as_("root")).status_code == 200
    assert client.post("/v1/warm", json={"text": "a"}, headers=as_("user")).status_code == 403
    assert client.get("/health", headers={"host": "any.where"}).status_code == 200


def test_the_tenant_of_a_key_reaches_the_engine_and_the_record() -> None:
    stand = Stand([key_of("user")], api_keys="f")
    client_of(stand).post(COMPLETIONS, json={"prompt": "hi"}, headers=as_("user"))
    assert stand.engine.calls[0]["tenant"] == "tenant of user"
    assert stand.telemetry.records[0].tenant == "tenant of user"


def test_a_body_is_not_read_before_the_key_is_known() -> None:
    client = client_of(Stand([key_of("user")], api_keys="f"))
    reply = client.post(COMPLETIONS, content=b"{", headers={"content-type": "application/json"})
    assert reply.status_code == 401


def test_requests_over_the_limit_of_a_key_are_429() -> None:
    clock_s = [0.0]
    keys = [key_of("a", requests_per_minute=2), key_of("b")]
    client = client_of(Stand(keys, lambda: clock_s[0], api_keys="f"))
    for status in (200, 200, 429):
        assert client.get("/v1/models", headers=as_("a")).status_code == status
    late = client.get("/v1/models", headers=as_("a"))
    assert late.headers["retry-after"] == "30"
    assert late.json()["error"]["code"] == "rate_limit_exceeded"
    assert client.get("/v1/models", headers=as_("b")).status_code == 200
    clock_s[0] = 30.0
    assert client.get("/v1/models", headers=as_("a")).status_code == 200


def test_tokens_over_the_limit_of_a_key_are_429_and_unused_ones_come_back() -> None:
    stand = Stand([key_of("a", tokens_per_minute=30)], lambda: 0.0, api_keys="f")
    client = client_of(stand)
    body = {"prompt": "hi", "max_tokens": 20}  # takes 2 + 3
    for status in (200, 200, 429):
        assert client.post(COMPLETIONS, json=body, headers=as_("a")).status_code == status
    stand.engine.max_running = 0
    small = {"prompt": "hi", "max_tokens": 10}
    for _ in range(5):
        assert client.post(COMPLETIONS, json=small, headers=as_("a")).status_code == 503


def test_tokens_that_no_minute_has_are_refused_for_good() -> None:
    client = client_of(Stand([key_of("a", tokens_per_minute=30)], lambda: 0.0, api_keys="f"))
    reply = client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 29}, headers=as_("a"))
    assert (reply.status_code, reply.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in reply.headers


def test_tokens_of_an_answer_that_broke_are_paid_for() -> None:
    stand = Stand([key_of("a", tokens_per_minute=30)], lambda: 0.0, api_keys="f")
    client, body = client_of(stand), {"prompt": "hi", "max_tokens": 20}  # takes 2 + 1
    stand.engine.fault = KVBoostError("a fault")
    statuses = [client.post(COMPLETIONS, json=body, headers=as_("a")).status_code for _ in range(4)]
    assert statuses == [503, 503, 503, 429]
    assert stand.telemetry.records[0].generated_tokens == 1


def test_nobody_administrates_where_anybody_may_come() -> None:
    client = client_of(Stand(allow_anonymous=True))
    assert client.get("/v1/models").status_code == 200
    for path in ("/v1/cache", "/v1/stats", "/metrics"):
        assert client.get(path).status_code == 403


def test_web_pages_may_send_the_headers_of_clients() -> None:
    client = client_of(Stand(cors_origin=("http://app",)))
    ask = {
        "origin": "http://app",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-lang",
    }
    assert client.options(CHAT, headers=ask).status_code == 200


def test_web_pages_are_served_only_where_their_origin_is_named() -> None:
    ask = {"origin": "http://app", "access-control-request-method": "POST"}
    assert client_of(Stand()).options(CHAT, headers=ask).status_code == 405
    client = client_of(Stand(cors_origin=("http://app",)))
    allowed = client.options(CHAT, headers=ask)
    assert allowed.headers["access-control-allow-origin"] == "http://app"
    other = client.options(CHAT, headers={**ask, "origin": "http://evil"})
    assert "access-control-allow-origin" not in other.headers


def test_without_keys_only_names_of_this_machine_are_served(client: TestClient) -> None:
    for host, status in (
        ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("[::1]", 200),
        ("evil.com", 403), ("evil.com:8000", 403), ("", 403),
    ):  # fmt: skip
        assert client.get("/v1/models", headers={"host": host}).status_code == status
    anybody = client_of(Stand(allow_anonymous=True))
    assert anybody.get("/v1/models", headers={"host": "evil.com"}).status_code == 200


def test_the_document_tells_all_paths_and_statuses(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/health", "/ready", "/metrics", "/v1/models", COMPLETIONS, CHAT} <= set(paths)
    statuses = set(paths[CHAT]["post"]["responses"])
    assert {"200", "400", "401", "413", "429", "503", "504"} <= statuses
    assert "422" not in statuses


MANY = 200_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * MANY + [-1]},
        {"prompt": ["a"] * MANY + [3]},
        {"prompt": [[1, -1]] * MANY},
        {"prompt": [None] * MANY},
        {"prompt": "a", **dict.fromkeys(map(str, range(MANY)))},
        {"prompt": "a", "stop": [1] * MANY},
        {"prompt": "a", "documents": [1] * MANY},
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
        {"prompt": "a", "metadata": dict.fromkeys(map(str, range(MANY)), 5)},
        {"messages": [{}] * MANY},
        {"messages": [dict.fromkeys(map(str, range(MANY)), 1)]},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]},
        {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]},
        {"messages": USER, "tools": [{}] * MANY},
        {"messages": USER, "modalities": ["x"] * MANY},
    ],
)
def test_a_body_full_of_errors_is_given_up_early(body: Any) -> None:
    kind = ChatBody if "messages" in body else CompletionBody
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    assert error.value.error_count() < 500
