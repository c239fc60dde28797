"""Random request bodies, good ones that something was done to, and a client that sends them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.serving.soak import fault_of

CHAT, COMPLETIONS, WARM = "/v1/chat/completions", "/v1/completions", "/v1/warm"
PIN, DELETE = "/v1/cache/pin", "/v1/cache/delete"
PATHS = (CHAT, CHAT, CHAT, COMPLETIONS, COMPLETIONS, COMPLETIONS, WARM, PIN, DELETE)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
COMMON: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 1,
    "stop": ["\n", "end"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "reuse": "auto",
    "documents": ["Hello", "upon a"],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.0},
    "user": "somebody",
}
VALID: dict[str, dict[str, Any]] = {
    CHAT: COMMON
    | {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "tools": [TOOL],
        "tool_choice": "required",
    },
    COMPLETIONS: COMMON | {"prompt": "Once upon a time", "logprobs": 2, "echo": False},
    WARM: {"text": "Some text to read.", "pin": True, "ttl_s": 1.0, "anywhere": True},
    PIN: {"text": "Some text to read.", "ttl_s": 1.0},
    DELETE: {"text": "Some text to read."},
}
LARGEST_BYTES = 4 * 2**20  # a server may hang up on what it does not want to read
NEEDED = {"model", "messages", "prompt", "max_tokens", "text"}
NEEDS = {"stream_options": "stream", "top_logprobs": "logprobs", "tool_choice": "tools"}
EXCLUDES = {"tools": "response_format", "logprobs": "echo"}
ALLOWED = {200, 400, 404, 413, 422, 429, 503, 504}
PATIENCE_S = 20.0  # a body that is good may ask for a long answer: we hang up
MAX_EXAMPLES = 20
HUNG_UP = "hung up"

Body = dict[str, Any]


async def fuzz(client: httpx.AsyncClient, num_bodies: int, num_clients: int) -> Body:
    """Send bodies by several clients: how often which status came, and what should not have."""
    model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    statuses: Counter[str] = Counter()
    faults: list[str] = []
    numbers = iter(range(num_bodies))

    async def work() -> None:
        for number in numbers:  # shared: each client takes the next one
            path, body = random_request(random.Random(number), model)
            status, fault = await _send(client, path, body)
            statuses[status] += 1
            if fault:
                faults.append(f"body {number}: {fault}; sent {body[:300]!r}")

    await asyncio.gather(*(work() for _ in range(num_clients)))
    health = await client.get("/health")
    if health.status_code != 200:
        faults.append(f"/health answers {health.status_code} afterwards")
    return {"statuses": statuses, "violations": faults[:MAX_EXAMPLES]}


async def _send(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[str, str]:
    headers = {"Content-Type": "application/json"}
    try:
        reply = await client.post(path, content=body, headers=headers)
    except httpx.ReadTimeout:
        return HUNG_UP, ""
    except httpx.HTTPError as error:
        return "lost", repr(error)
    return str(reply.status_code), wrong_with(reply)


def wrong_with(reply: httpx.Response) -> str:
    """What a client should not have got; empty if it is all right."""
    if reply.status_code not in ALLOWED:
        return f"status {reply.status_code}: {reply.text[:200]}"
    return "" if reply.status_code == 200 else fault_of(reply)


def random_request(chance: random.Random, model: str) -> tuple[str, bytes]:
    """A path and what to send there."""
    path = chance.choice(PATHS)
    body: Body = copy.deepcopy(VALID[path])
    if path in (CHAT, COMPLETIONS):
        body["model"] = model
    for name in list(body):  # few parameters at a time: the first wrong one hides the others
        if name not in NEEDED and chance.random() < 0.7:
            del body[name]
    for name, other in NEEDS.items():
        if other not in body:
            body.pop(name, None)
    for name, other in EXCLUDES.items():
        if name in body:
            body.pop(other, None)
    for _ in range(chance.choice([0, 1, 1, 1, 2, 4])):
        chance.choice(CHANGES)(body, chance)
    content = json.dumps(body, ensure_ascii=chance.random() < 0.5)
    raw = content.encode("utf-8", "surrogatepass")[:LARGEST_BYTES]
    return path, _damaged(raw, chance) if chance.random() < 0.15 else raw


def _replace(body: Body, chance: random.Random) -> None:
    place, key = _somewhere(body, chance)
    place[key] = random_value(chance)


def _remove(body: Body, chance: random.Random) -> None:
    place, key = _somewhere(body, chance)
    del place[key]


def _add(body: Body, chance: random.Random) -> None:
    body[
        chance.choice([*VALID[CHAT], *VALID[COMPLETIONS], "", "__proto__", "best_of", "suffix"])
    ] = random_value(chance)


def _nest(body: Body, chance: random.Random) -> None:
    place, key = _somewhere(body, chance)
    value = place[key]
    for _ in range(chance.choice([1, 5, 100])):
        value = [value] if chance.random() < 0.5 else {"a": value}
    place[key] = value


def _repeat(body: Body, chance: random.Random) -> None:
    place, key = _somewhere(body, chance)
    value, times = place[key], chance.choice([2, 20, 500])
    if isinstance(value, str | list) and len(json.dumps(value)) * times < LARGEST_BYTES:
        is_text = isinstance(value, str)  # else each a copy, or later changes multiply
        copies = (copy.deepcopy(each) for _ in range(times) for each in value)
        place[key] = value * times if is_text else list(copies)


CHANGES: tuple[Callable[[Body, random.Random], None], ...] = (
    _replace,
    _replace,
    _replace,
    _remove,
    _add,
    _nest,
    _repeat,
)


def random_value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with a liking for the edges of ranges."""
    plain: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400]
    plain += [0.5, -0.5, 1e308, -1e-308, float("nan"), float("inf"), 1.0000001]
    plain += ["", " ", "\x00", "\ud800", "a" * chance.choice([1, 100, 5000]), "\U0001f600", "-1"]
    plain += ["json_object", "auto", "required", "user", "tool", "assistant", "none"]
    if depth < 3 and chance.random() < 0.25:
        items = [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        names = [chance.choice(["type", "role", "content", "text", "", "5", "name"]) for _ in items]
        return items if chance.random() < 0.5 else dict(zip(names, items, strict=True))
    return chance.choice(plain)


def _somewhere(body: Body, chance: random.Random) -> tuple[Any, Any]:
    """A container in the body and a key of it."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            places.append((value, key))
            if isinstance(value[key], dict | list):
                collect(value[key])

    collect(body)
    return chance.choice(places) if places else (body.setdefault("x", {"y": 0}), "y")


def _damaged(raw: bytes, chance: random.Random) -> bytes:
    """No longer JSON, most of the time."""
    kind = chance.randrange(4)
    at = chance.randrange(len(raw))
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
    if kind == 2:
        return raw + raw[:at]
    return chance.randbytes(chance.randrange(200))
