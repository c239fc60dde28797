"""The endpoints, with an engine that says what it is told to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import CALL, CHAT, COMPLETIONS, USER, WEATHER, chat, complete, refusal, streamed
from fake_serving import Stand


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
    chosen_alone = complete(client, logprobs=0)["choices"][0]["logprobs"]
    assert chosen_alone["tokens"] == logprobs["tokens"]
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


def test_calls_of_tools_are_streamed_and_numbered(client: TestClient, stand: Stand) -> None:
    stand.engine.pieces = [CALL[:20], f"{CALL[20:]}\n{CALL}\n", CALL]
    parts = [part["choices"][0] for part in streamed(client, CHAT, tools=[WEATHER])[:-1]]
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1, 2]
    assert all(call["id"] and call["function"]["name"] == "weather" for call in calls)
    assert parts[-1]["finish_reason"] == "tool_calls"


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
