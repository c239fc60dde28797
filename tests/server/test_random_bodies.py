"""Random bodies against the running server: each is answered or refused, and none does harm."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import pytest

from random_bodies import HUNG_UP, PATIENCE_S, fuzz
from servers import KVBoostServer

pytestmark = pytest.mark.servers

PROMPT = {"prompt": "hello", "temperature": 0, "max_tokens": 16}


def test_random_bodies_are_answered_or_refused(guarded: KVBoostServer) -> None:
    num_bodies = int(os.environ.get("KVBOOST_TEST_BODIES", "1000"))
    before = answer_of(guarded)
    row = asyncio.run(fuzzed(guarded, num_bodies))
    assert row["violations"] == []
    assert HUNG_UP not in row["statuses"]  # a body that keeps the others waiting
    assert row["statuses"]["200"] > 0.15 * num_bodies
    assert row["statuses"]["400"] > 0.2 * num_bodies
    assert answer_of(guarded) == before
    assert guarded.process.poll() is None
    assert guarded.num_requests() == 0
    assert "Traceback" not in guarded.log.read_text()


async def fuzzed(server: KVBoostServer, num_bodies: int) -> dict[str, Any]:
    key = {"Authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, headers=key) as client:
        return await fuzz(client, num_bodies, num_clients=16)


def answer_of(server: KVBoostServer) -> str:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    reply = httpx.post(f"{server.url}/v1/completions", json=PROMPT, headers=headers)
    text: str = reply.raise_for_status().json()["choices"][0]["text"]
    return text
