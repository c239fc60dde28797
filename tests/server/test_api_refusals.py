"""What the endpoints refuse, and how they tell it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import (
    CALLED,
    CHAT,
    COMPLETIONS,
    USER,
    WEATHER,
    chat,
    client_of,
    complete,
    events,
    refusal,
    streamed,
)
from fake_serving import Stand
from kvboost.core import Sampling
from kvboost.errors import ConfigError, KVBoostError, QueueFull
from kvboost.server.record import RequestRecord

TEXT = {"type": "text", "text": "a"}
CALLS = [{"id": "a", "function": CALLED}] * 200
LARGE = {"description": "x" * 140_000}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": LARGE}}
OTHER = {"type": "function", "function": {"name": "other"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tempereture": 1}, "tempereture"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"verbosity": "high"}, "verbosity"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"reuse": "some"}, "reuse"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
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
        (CHAT, {"messages": USER * 3000}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT] * 3000}]}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": CALLS}]},
            "messages[0].tool_calls",
        ),
        (CHAT, {"response_format": SCHEMA}, "response_format"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "x", **LARGE}}]}, "tools"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    client: TestClient, path: str, body: Any, param: str
) -> None:
    assert refusal(client, path, **body)["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, {"tools": [WEATHER], "tool_choice": OTHER}, "'other'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [PICTURE]}]},
            "'image_url': this model reads",
        ),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 15}, "45 answers at once; the limit is 40"),
        (COMPLETIONS, {"prompt": [[]] * 100_000}, "more than 64 prompts"),
    ],
)
def test_a_refusal_says_shortly_what_is_wrong(
    client: TestClient, path: str, body: Any, told: str
) -> None:
    message = refusal(client, path, **body)["message"]
    assert told in message and len(message) < 200


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
    async def full(*_: Any) -> None:
        raise QueueFull("128 of your requests are already waiting")

    monkeypatch.setattr("kvboost.server.turns.Turns.run", full)
    assert refusal(client, status=503)["code"] == "queue_full"


def test_without_keys_requests_of_proxies_and_other_sites_are_refused(client: TestClient) -> None:
    named = client_of(Stand(cors_origin=("http://app",)))
    anybody = client_of(Stand(allow_anonymous=True))
    for headers, code in (
        ({"x-forwarded-for": "10.0.0.1"}, "forwarded"),
        ({"forwarded": "for=10.0.0.1"}, "forwarded"),
        ({"via": "1.1 proxy"}, "forwarded"),
        ({"origin": "http://evil"}, "cross_site"),
        ({"origin": "null"}, "cross_site"),
        ({"sec-fetch-site": "cross-site"}, "cross_site"),
        ({"origin": "http://app"}, "cross_site"),
    ):
        reply = client.post("/v1/cache/delete", json={"everything": True}, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, code)
        assert anybody.get("/v1/models", headers=headers).status_code == 200
    for headers in ({}, {"origin": "http://localhost"}, {"sec-fetch-site": "same-origin"}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert named.get("/v1/models", headers={"origin": "http://app"}).status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json_is_refused(client: TestClient, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    reply = client.post(CHAT, content=b"{}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "wrong_type")
    assert "application/json" in reply.json()["error"]["message"]
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        reply = client.post(CHAT, content=b"{}", headers={"content-type": kind})
        assert reply.status_code == 400


def test_an_engine_that_is_stuck_is_not_ready(client: TestClient, stand: Stand) -> None:
    assert client.get("/ready").status_code == 200
    stand.engine.busy_s = 1e3
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200


def test_prompts_beyond_the_context_are_refused(client: TestClient) -> None:
    error = refusal(client, COMPLETIONS, prompt="x" * 999)
    assert error["code"] == "context_length_exceeded"
    assert "999 tokens and 16 are to be generated" in error["message"]
    unread = refusal(client, COMPLETIONS, prompt="x" * 2000)  # too many for the longest tokens
    assert unread["code"] == "context_length_exceeded"
    assert "2000 characters" in unread["message"]


def test_prompts_beyond_the_configured_limit_are_refused() -> None:
    client = client_of(Stand(max_prompt_tokens=5))
    assert "the limit is 5" in refusal(client, COMPLETIONS, prompt="abcdef")["message"]
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


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "messages"), ("/v1/responses", "input"), ("/v1/warm", "messages")]
)
def test_too_many_parts_are_refused_before_they_are_looked_at(
    client: TestClient, path: str, name: str
) -> None:
    part = {"type": "input_text" if name == "input" else "text", "text": ""}
    message = {"role": "user", "content": [part] * 100}
    error = client.post(path, json={name: [message] * 21}).json()["error"]
    assert (error["param"], "more than 2048 parts" in error["message"]) == (name, True)


UNWRITABLE = [{"description": "\ud800"}, {"parameters": {"maximum": math.inf}}]


@pytest.mark.parametrize("fields", UNWRITABLE)
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_that_could_not_be_sent_back_are_refused(
    client: TestClient, stand: Stand, fields: dict[str, Any], choice: str
) -> None:
    function = {"name": "f", **fields}
    tools = [{"type": "function", "function": function}]
    own = {"messages": USER, "tools": tools, "tool_choice": choice}
    for path, body in (
        (CHAT, own),
        ("/v1/responses", {**own, "input": "hi", "tools": [{"type": "function", **function}]}),
    ):
        content = json.dumps({k: v for k, v in body.items() if path == CHAT or k != "messages"})
        content = content.replace("Infinity", "1e999")
        kind = {"content-type": "application/json"}
        reply = client.post(path, content=content, headers=kind)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert stand.engine.calls == []


def test_a_reserved_variable_and_a_fault_of_the_template_are_the_request_s(
    client: TestClient, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("arrangement", "documents", "messages"):
        error = refusal(client, chat_template_kwargs={name: 1})
        assert (error["param"], f"{name!r} is set" in error["message"]) == (
            "chat_template_kwargs",
            True,
        )

    def nest(*_: Any, **__: Any) -> Any:
        raise RecursionError("too deep")

    monkeypatch.setattr(type(stand.engine.tokenizer), "apply_chat_template", nest)
    assert "cannot render" in refusal(client)["message"]


def test_long_arguments_of_calls_are_refused_before_they_are_rendered(
    client: TestClient, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Any] = []
    monkeypatch.setattr(type(stand.engine.tokenizer), "apply_chat_template", rendered.append)
    call = {"id": "1", "function": {"name": "f", "arguments": "x" * 200_000}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert refusal(client, messages=messages)["code"] == "context_length_exceeded"
    assert rendered == []


def test_top_k_is_no_more_than_there_are_tokens(client: TestClient, stand: Stand) -> None:
    reply = client.post(CHAT, json={"messages": USER, "top_k": 10**400})
    assert reply.status_code == 200
    assert stand.engine.sampling.top_k <= 300
    with pytest.raises(ConfigError, match="top_k"):
        Sampling(top_k=2**31)


def test_a_preface_without_texts_anywhere_is_refused(client: TestClient) -> None:
    error = client.post("/v1/warm", json={"text": "a", "preface": "b"}).json()["error"]
    assert error["param"] == "preface"


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
        assert reply.headers["x-request-id"]
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert client.get(CHAT).headers["allow"] == "POST"


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
        monkeypatch.setattr(RequestRecord, "elapsed_s", property(lambda _, s=late_s: s))
        assert client_of(stand).post(CHAT, json={"messages": USER}).status_code == status
    assert given == [40.0]


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
    assert error["message"] == "internal error (request id r1)"
    assert "secret path" in caplog.text
