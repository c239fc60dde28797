"""What is observed, shown and changed, by whom: records, the cache, keys, origins."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from asking import CHAT, COMPLETIONS, USER, chat, client_of, refusal, streamed
from fake_serving import Stand
from kvboost.errors import KVBoostError
from kvboost.server.bodies import ChatBody, CompletionBody, DetokenizeBody
from kvboost.server.responses import ResponsesBody


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
    answer = client.post("/v1/cache/delete", json={"everything": True}).json()
    assert answer == {"num_deleted": 3, "pending": ["redis"]}
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
    error = late.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert client.get("/v1/models", headers=as_("b")).status_code == 200
    clock_s[0] = 30.0
    assert client.get("/v1/models", headers=as_("a")).status_code == 200


def test_tokens_over_the_limit_of_a_key_are_429_and_unused_ones_come_back() -> None:
    stand = Stand([key_of("a", tokens_per_minute=30)], lambda: 0.0, api_keys="f")
    client = client_of(stand)
    body = {"prompt": "hi", "max_tokens": 20}  # takes 2 + 3
    replies = [client.post(COMPLETIONS, json=body, headers=as_("a")) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[-1].json()["error"]["type"] == "tokens"
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
    assert client_of(Stand()).options(CHAT, headers=ask).status_code == 403
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
    assert {"/", "/v1/responses", "/tokenize", "/detokenize"} <= set(paths)
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
        {"messages": USER, "chat_template_kwargs": {"a": [[[[[[[[[1]]]]]]]] * MANY]}},
        {"input": [{}] * MANY},
        {"input": [dict.fromkeys(map(str, range(MANY)), 1)]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}] * MANY}]},
        {"input": "a", "tools": [{}] * MANY},
        {"input": "a", "include": ["x"] * MANY},
        {"tokens": [-1] * MANY},
    ],
)
def test_a_body_full_of_errors_is_given_up_early(body: Any) -> None:
    kinds = {
        "messages": ChatBody,
        "prompt": CompletionBody,
        "input": ResponsesBody,
        "tokens": DetokenizeBody,
    }
    kind = next(kind for name, kind in kinds.items() if name in body)
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    assert error.value.error_count() < 500
