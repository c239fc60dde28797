"""Variables of a chat template, from the official client to the prompt of the running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from servers import KVBoostServer

pytestmark = pytest.mark.servers

USER = [{"role": "user", "content": "hi"}]
NO_THOUGHT = "<think>\n\n</think>\n\n"  # a token for each byte
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
EFFORT = "<|im_start|>system\nReasoning: high<|im_end|>\n"


@pytest.fixture(scope="module")
def client(guarded: KVBoostServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{guarded.url}/v1", api_key="plain-key", max_retries=0) as made:
        yield made


def chat_tokens(client: OpenAI, **given: Any) -> int:
    fields = {"model": "tiny", "messages": USER, "max_tokens": 2} | given
    return client.chat.completions.create(**fields).usage.prompt_tokens


def input_tokens(client: OpenAI, **given: Any) -> int:
    fields = {"model": "tiny", "input": "hi", "max_output_tokens": 2} | given
    return client.responses.create(**fields).usage.input_tokens


def tokenized(server: KVBoostServer, path: str, **body: Any) -> Any:
    headers = {"Authorization": "Bearer plain-key"}
    return httpx.post(server.url + path, json=body, headers=headers).raise_for_status().json()


def test_thinking_is_switched_off(client: OpenAI) -> None:
    on = chat_tokens(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert chat_tokens(client) == on
    assert chat_tokens(client, extra_body=OFF) == on + len(NO_THOUGHT)
    assert input_tokens(client) == on
    assert input_tokens(client, extra_body=OFF) == on + len(NO_THOUGHT)


def test_an_effort_is_in_the_prompt(client: OpenAI) -> None:
    plain = chat_tokens(client)
    assert chat_tokens(client, reasoning_effort="high") == plain + len(EFFORT)
    assert input_tokens(client, reasoning={"effort": "high"}) == plain + len(EFFORT)


def test_the_prompt_can_be_looked_at(guarded: KVBoostServer) -> None:
    for variables, ending in (({}, "<|im_start|>assistant\n"), (OFF, NO_THOUGHT)):
        tokens = tokenized(guarded, "/tokenize", messages=USER, **variables)["tokens"]
        assert tokenized(guarded, "/detokenize", tokens=tokens)["prompt"].endswith(ending)


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "tools", "conversation", "messages", "padding", "self"]
)
def test_what_the_server_sets_is_no_variable(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"'{name}' is set by the server") as refused:
        chat_tokens(client, extra_body={"chat_template_kwargs": {name: True}})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({"reasoning_effort": "\ud800"}, 400),  # cannot be tokenized
        ({"reasoning_effort": ["x", {}, 1e308]}, 200),
        ({"raise_exception": 5, "bos_token": {}}, 200),
    ],
)
def test_no_variable_does_harm(guarded: KVBoostServer, variables: Any, status: int) -> None:
    body = {"messages": USER, "max_tokens": 2, "chat_template_kwargs": variables}
    headers = {"Authorization": "Bearer plain-key", "Content-Type": "application/json"}
    path = f"{guarded.url}/v1/chat/completions"
    reply = httpx.post(path, content=json.dumps(body), headers=headers)
    assert reply.status_code == status, reply.text
