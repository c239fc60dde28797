"""Greedy text does not depend on what else runs: many requests at once against each alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest

from servers import KVBoostServer

pytestmark = [pytest.mark.model, pytest.mark.servers]

NUM_AT_ONCE = 32
PAGES = sorted(topics.values(), key=len)[-8:]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def make_request(number: int) -> tuple[str, dict[str, Any]]:
    """Short and long, chats and completions, whole and streamed; half share their beginning."""
    chance = random.Random(number)
    shared = PAGES[chance.randrange(3)][: chance.choice([200, 500])] if number % 2 else ""
    start = chance.randrange(4000)
    text = shared + PAGES[number % len(PAGES)][start : start + chance.choice([20, 100, 300])]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": chance.choice([2, 5, 8])}
    body["stream"] = chance.random() < 0.5
    if chance.random() < 0.5:
        return COMPLETIONS, body | {"prompt": text}
    return CHAT, body | {"messages": [{"role": "user", "content": f"{text}\nGo on."}]}


async def text_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    reply = (await client.post(path, json=body)).raise_for_status()
    if not body["stream"]:
        choice = reply.json()["choices"][0]
        return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    *data, done = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert done == "[DONE]"
    choices = [json.loads(each)["choices"][0] for each in data]
    pieces = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
              for choice in choices]  # fmt: skip
    return "".join(pieces)


def test_texts_under_load_are_those_alone(live: KVBoostServer) -> None:
    num_requests = int(os.environ.get("KVBOOST_TEST_TEXTS", "20"))
    requests = [make_request(number) for number in range(num_requests)]
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
        async with limit:
            return await text_of(client, path, body)

    async def run() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(base_url=live.url, timeout=300) as client:
            together = await asyncio.gather(*(ask(client, *each) for each in requests))
            cold = {"reuse": "off"}  # else it would only be read from what the others have stored
            alone = [await text_of(client, path, body | cold) for path, body in requests]
            return together, alone

    together, alone = asyncio.run(run())
    assert [
        each for each in zip(requests, together, alone, strict=True) if each[1] != each[2]
    ] == []
    assert len(set(alone)) > 0.7 * num_requests  # a mix-up would show
