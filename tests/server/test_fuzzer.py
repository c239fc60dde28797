"""The fuzzer sends what it should, and tells what it should not get."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from fake_openai import FakeServer
from random_bodies import fuzz, random_request, wrong_with


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def test_bodies_are_good_bad_and_broken() -> None:
    sent = [random_request(random.Random(n), "m") for n in range(2000)]
    assert sent == [random_request(random.Random(n), "m") for n in range(2000)]
    assert 1600 < sum(is_json(body) for _, body in sent) < 1990
    assert len({body for _, body in sent}) > 1500
    assert min(Counter(path for path, _ in sent).values()) > 200


def test_a_server_that_fails_is_caught() -> None:
    async def run(server: FakeServer) -> dict[str, object]:
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
            return await fuzz(client, 600, 3)

    row = asyncio.run(run(FakeServer("fails")))
    assert any("status 500" in each for each in row["violations"])
    assert sum(row["statuses"].values()) == 600


@pytest.mark.parametrize(
    ("status", "content", "is_wrong"),
    [
        (200, b"{}", False),
        (400, b'{"error": {"message": "no"}}', False),
        (400, b'{"detail": "no"}', True),
        (400, b'{"error": {"message": "Traceback (most recent call last)"}}', True),
        (500, b'{"error": {"message": "no"}}', True),
        (503, b'{"error": {"message": "busy, and not told until when"}}', True),
        (504, b'{"error": {"message": "late"}}', False),
    ],
)
def test_replies_are_judged(status: int, content: bytes, is_wrong: bool) -> None:
    assert bool(wrong_with(httpx.Response(status, content=content))) == is_wrong
