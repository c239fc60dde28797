"""Questions to the endpoints in the tests of the server, and what must be true of all answers."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

from fake_serving import Stand

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
CALLED = {"name": "weather", "arguments": "{}"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


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
