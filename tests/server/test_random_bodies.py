"""Random bodies against the running server: each is answered or refused, and none does harm."""

from __future__ import annotations

import argparse
import os

import httpx
import pytest

from benchmarks.serving import fuzz
from servers import KVBoostServer

pytestmark = pytest.mark.servers

PROMPT = {"prompt": "hello", "temperature": 0, "max_tokens": 16}


def test_random_bodies_are_answered_or_refused(guarded: KVBoostServer) -> None:
    num_bodies = os.environ.get("KVBOOST_TEST_BODIES", "1000")
    before = answer_of(guarded)
    parser = argparse.ArgumentParser()
    fuzz.add_arguments(parser)
    given = ["--url", guarded.url, "--api-key", guarded.api_key, "--bodies", num_bodies]
    row = fuzz.run(parser.parse_args(given))[0]
    assert row["violations"] == []
    assert "hung up" not in row["statuses"]  # a body that keeps the others waiting
    assert row["statuses"]["200"] > 0.15 * row["bodies"]
    assert row["statuses"]["400"] > 0.2 * row["bodies"]
    assert answer_of(guarded) == before
    assert guarded.process.poll() is None
    assert guarded.num_requests() == 0
    assert "Traceback" not in guarded.log.read_text()


def answer_of(server: KVBoostServer) -> str:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    reply = httpx.post(f"{server.url}/v1/completions", json=PROMPT, headers=headers)
    text: str = reply.raise_for_status().json()["choices"][0]["text"]
    return text
