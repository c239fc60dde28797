"""Can a body break the server? Random bodies: refused or answered, and the server stays up.

Start the server with --max-new-tokens 8 --max-prompt-tokens 512, or some bodies take long. One is
made again by `fuzz_bodies.random_request(random.Random("SEED NUMBER"), model)`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter

import httpx

from benchmarks.common.measure import Row
from benchmarks.serving.fuzz_bodies import random_request
from benchmarks.serving.soak_verdict import fault_of

ALLOWED = {200, 400, 404, 413, 422, 429, 503, 504}
PATIENCE_S = 20.0  # a body that is good may ask for a long answer: we hang up
MAX_EXAMPLES = 20
HUNG_UP = "hung up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> list[Row]:
    return [asyncio.run(_run(options))]


async def _run(options: argparse.Namespace) -> Row:
    headers = {"Authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(
        base_url=options.url, timeout=PATIENCE_S, headers=headers
    ) as client:
        return await fuzz(client, options.bodies, options.clients, options.seed)


async def fuzz(client: httpx.AsyncClient, num_bodies: int, num_clients: int, seed: int) -> Row:
    """Send bodies; the row says how often which status came, and what should not have."""
    model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    statuses: Counter[str] = Counter()
    faults: list[str] = []
    slow: list[int] = []  # bodies that we hung up on
    numbers = iter(range(num_bodies))

    async def work() -> None:
        for number in numbers:  # shared: each client takes the next one
            path, body = random_request(random.Random(f"{seed} {number}"), model)
            status, fault = await _send(client, path, body)
            statuses[status] += 1
            if status == HUNG_UP:
                slow.append(number)
            if fault:
                faults.append(f"body {number} of seed {seed}: {fault}; sent {body[:300]!r}")
            if number % 5000 == 4999:
                print(f"  {number + 1} bodies: {dict(statuses)}", flush=True)

    await asyncio.gather(*(work() for _ in range(num_clients)))
    health = await client.get("/health")
    if health.status_code != 200:
        faults.append(f"/health answers {health.status_code} afterwards")
    return {
        "bodies": num_bodies,
        "seed": seed,
        "statuses": dict(sorted(statuses.items())),
        "slow": slow[:MAX_EXAMPLES],
        "faults": len(faults),
        "violations": faults[:MAX_EXAMPLES],
    }


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
