"""Variables of chat templates, and /tokenize and /detokenize, which clients of vLLM know."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import CHAT, COMPLETIONS, USER, WEATHER, chat, client_of, refusal
from fake_serving import Stand


def post(client: TestClient, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def error_of(client: TestClient, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_variables_reach_the_template(client: TestClient, stand: Stand) -> None:
    chat(client, chat_template_kwargs={"enable_thinking": False, "date": {"year": 2025}})
    assert stand.engine.tokenizer.rendered["enable_thinking"] is False
    assert stand.engine.tokenizer.rendered["date"] == {"year": 2025}
    chat(client, reasoning_effort="high")
    assert stand.engine.tokenizer.rendered["reasoning_effort"] == "high"
    chat(client, reasoning_effort=None, chat_template_kwargs=None)
    assert "reasoning_effort" not in stand.engine.tokenizer.rendered


@pytest.mark.parametrize(
    "variables",
    [
        {"a": "x" * 17_000},
        {str(number): "x" * 100 for number in range(200)},
        {"a": [[[[[[[[[1]]]]]]]]]},
        {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": 1}}}}}}}}},
        ["a"],
    ],
)
def test_variables_have_bounds(client: TestClient, variables: Any) -> None:
    assert refusal(client, chat_template_kwargs=variables)["param"] == "chat_template_kwargs"
    chat(client, chat_template_kwargs={"a": [[[[[[[1]]]]]]]})


def test_an_effort_is_given_once(client: TestClient) -> None:
    twice = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert refusal(client, **twice)["param"] == "reasoning_effort"
    assert refusal(client, reasoning_effort="huge")["param"] == "reasoning_effort"


def test_prompts_have_no_template(client: TestClient) -> None:
    for name, value in (("reasoning_effort", "low"), ("chat_template_kwargs", {"a": 1})):
        error = refusal(client, COMPLETIONS, **{name: value})
        assert (error["param"], "chat template" in error["message"]) == (name, True)


def test_a_prompt_is_tokenized_and_back(client: TestClient) -> None:
    tokens = post(client, "/tokenize", prompt="hi")
    assert tokens == {
        "count": 3,
        "max_model_len": 1000,
        "tokens": [1, 104, 105],
        "token_strs": None,
    }
    bare = post(client, "/tokenize", prompt="hi", add_special_tokens=False, return_token_strs=True)
    assert (bare["tokens"], bare["token_strs"]) == ([104, 105], ["h", "i"])
    assert post(client, "/detokenize", tokens=[104, 105], model="fake") == {"prompt": "hi"}
    assert post(client, "/detokenize", tokens=[]) == {"prompt": ""}


def test_a_chat_is_tokenized_as_it_would_be_answered(client: TestClient, stand: Stand) -> None:
    given = {
        "messages": USER,
        "tools": [WEATHER],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    tokens = post(client, "/tokenize", **given)["tokens"]
    assert stand.engine.tokenizer.rendered["enable_thinking"] is True
    assert stand.engine.tokenizer.rendered["add_generation_prompt"] is True
    assert client.post(CHAT, json=given).status_code == 200
    assert tokens == stand.engine.calls[-1]["prompt"]
    post(client, "/tokenize", messages=USER, add_generation_prompt=False)
    assert stand.engine.tokenizer.rendered["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "hi", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "hi", "tools": [WEATHER]}, "tools"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": USER, "tools": [WEATHER] * 129}, "tools"),
        ("/tokenize", {"messages": USER, "mood": 1}, "mood"),
        ("/tokenize", {"prompt": "x" * 2000}, "messages"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 1001}, "messages"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    client: TestClient, path: str, body: Any, param: str
) -> None:
    assert error_of(client, path, **body)["param"] == param


def test_a_count_may_be_above_the_context() -> None:
    client = client_of(Stand(max_prompt_tokens=5))
    assert post(client, "/tokenize", prompt="abcdefgh")["count"] == 9


def test_tokens_need_a_key_and_a_known_model(client: TestClient) -> None:
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [104]})):
        assert client.post(path, json={**body, "model": "gpt"}).status_code == 404
        guarded = client_of(Stand([{"sha256": "0" * 64, "tenant": "a"}]))
        assert guarded.post(path, json=body).status_code == 401
