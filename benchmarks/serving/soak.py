"""Does a server hold mixed load? Many clients, good and bad: right answers, flat memory, no 5xx.

Needs a running server with an fp32 model: every question of a pool is first asked alone, and under
load its answer must be the same, letter by letter. Give the server a short queue, so that bursts
overflow it, a deadline that long answers do not keep, and a small memory tier, which is full
before memory is compared (and blocks to work in, which it else takes from that size):
  --max-queue-size 32 --request-deadline-s 30 --max-cache-bytes 64MiB --num-blocks 1024
Ends with code 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from attacks import ATTACKS, Attack
from benchmarks.common.measure import Row, resident_mb
from benchmarks.serving.soak_questions import (
    CHAT,
    COMPLETIONS,
    Question,
    make_questions,
    tellable,
    text_of,
)

ABORTED = 0  # instead of a status: we hung up ourselves, before or while the answer came
GAVE_UP = -1  # no answer, or half of one


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    weight: int  # how often it is sent
    expected: frozenset[int]  # statuses that it may have
    must_happen: int | None  # the one that must be seen at least once, or it tested nothing


_BUSY = frozenset({503, 504})
KINDS = {
    "whole": Kind(30, _BUSY | {200}, 200),
    "stream": Kind(30, _BUSY | {200}, 200),
    "slow": Kind(8, _BUSY | {200}, 200),
    "abort": Kind(15, _BUSY | {ABORTED}, ABORTED),
    "deadline": Kind(2, _BUSY, 504),
    # The server may hang up on what it does not want to read.
    "oversize": Kind(2, frozenset({413, ABORTED}), 413),
    "malformed": Kind(6, frozenset({400}), 400),
    "invalid": Kind(5, frozenset({400}), None),
    "burst": Kind(0, _BUSY | {200}, 503),  # more at once than batch and queue hold
}
ANSWER_S = 300.0  # whoever waits longer gives up, which is a fault
SETTLE_S = 60.0  # for the last requests to end when the clients are gone
SAMPLE_S = 1.0
RETRY_S = 1.0
PAUSE_S = 1.0  # of a slow reader, at most
ATTACK_S = 8.0
PEACE_S = 12.0  # between two attacks
MAX_EXAMPLES = 20
# More than a server can write before its deadline.
LONG = {"max_tokens": 2000, "ignore_eos": True}
OVERSIZE_BYTES = 12 * 2**20
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": }',
    b"\xff\xfe{}",
    b'{"messages": [' * 2000,
    b'{"prompt": "\\ud800", "max_tokens": 1',
)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
INVALID: tuple[dict[str, Any], ...] = (  # changes of HELLO
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "nobody", "content": "hello"}]},
    {"temperature": -1},
    {"max_tokens": -5},
    {"max_tokens": "many"},
    {"top_p": 7},
)

Client = httpx.AsyncClient
Outcome = tuple[int, str]
"""A status, and what is wrong with the answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--questions", type=int, default=48, help="in the pool")
    parser.add_argument("--burst-every", type=float, default=30, help="seconds; 0: never")
    parser.add_argument(
        "--attacks", action="store_true", help="on the HTTP edge, one after another"
    )
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    parser.add_argument("--max-growth", type=float, default=0.05, help="of memory, last third")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> list[Row]:
    return [asyncio.run(Soak(options).run())]


@dataclass
class Tally:
    """Counts of what came back, and the first of what should not have."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_faults: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, kind: str, status: int, fault: str = "") -> None:
        """Note a request that is over; `fault` says what is wrong with its answer."""
        self.statuses[kind, status] += 1
        if status not in KINDS[kind].expected:
            fault = f"status {status}" + (f": {fault}" if fault else "")
        if fault:
            self.num_faults += 1
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(f"{kind}: {fault}")

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Counts of statuses for each kind, for a report."""
        found: dict[str, dict[str, int]] = {}
        for (kind, status), number in sorted(self.statuses.items()):
            found.setdefault(kind, {})[str(status)] = number
        return found

    def violations(self) -> list[str]:
        """What was wrong, as sentences; empty if nothing was."""
        missing = [
            f"no {kind} request got a {status}: it tested nothing"
            for kind, status in ((kind, KINDS[kind].must_happen) for kind in self.by_kind())
            if status is not None and not self.statuses[kind, status]
        ]
        wrong = [f"{self.num_faults} wrong answers"] if self.num_faults else []
        return wrong + missing


class Soak:
    """One run against one server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._tally = Tally()
        self._memory_mb: list[float] = []
        self._num_attacks = 0
        self._pool: list[Question] = []
        self._limit = 0  # requests that fit into batch and queue
        self._stop_at = 0.0

    async def run(self) -> Row:
        """Ask alone, then all at once, then look at what is left."""
        options = self._options
        async with self._client() as client, self._client(small_buffers=True) as slow:
            self._client_of = {kind: slow if kind == "slow" else client for kind in KINDS}
            await self._prepare(client)
            started = time.monotonic()
            self._stop_at = started + 60 * options.minutes
            watcher = asyncio.create_task(self._watch_memory())
            work = [self._visit(number) for number in range(options.clients)]
            await asyncio.gather(*work, self._bursts(), self._attacks())
            minutes = (time.monotonic() - started) / 60
            watcher.cancel()
            violations = self._tally.violations() + await self._left_behind(client)
        grown = growth(self._memory_mb) if len(self._memory_mb) >= 3 else None
        if grown is not None and grown > options.max_growth:
            violations.append(f"memory grew by {grown:.1%} in the last third")
        return {
            "clients": options.clients,
            "minutes": round(minutes, 2),
            "requests": self._tally.statuses.total(),
            "attacks": self._num_attacks,
            "statuses": self._tally.by_kind(),
            "questions": len(self._pool),
            "growth": None if grown is None else round(grown, 4),
            "memory_mb": [
                round(each) for each in self._memory_mb[:: len(self._memory_mb) // 60 + 1]
            ],
            "examples": self._tally.examples,
            "violations": violations,
        }

    def _client(self, *, small_buffers: bool = False) -> httpx.AsyncClient:
        """`small_buffers`: what is not read is soon felt by the server."""
        sizes = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)] if small_buffers else None
        return httpx.AsyncClient(
            base_url=self._options.url,
            timeout=ANSWER_S,
            headers={"Authorization": f"Bearer {self._options.api_key}"},
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                socket_options=sizes,
            ),
        )

    async def _prepare(self, client: Client) -> None:
        """The answers that questions have alone, and how much the server takes at once."""
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        asked = []
        for question in make_questions(self._options.questions, model, seed=self._options.seed):
            reply = (await client.post(question.path, json=question.body)).raise_for_status()
            asked.append(replace(question, answer=text_of(reply.json()["choices"][0])))
        self._pool = tellable(asked)
        marked = sum(each.marker in each.answer for each in self._pool)
        print(
            f"{len(self._pool)} of {len(asked)} questions have an answer of their own,"
            f" {marked} of these repeat the question's number",
            flush=True,
        )
        if len(self._pool) < len(asked) // 2:
            raise SystemExit("too few answers differ: this model could mix them up unseen")
        batch = await _batch(client)
        self._limit = batch["max_batch_size"] + batch["max_queue_size"]

    async def _visit(self, number: int) -> None:
        chance = random.Random(f"{self._options.seed} {number}")
        weights = [kind.weight for kind in KINDS.values()]
        await asyncio.sleep(chance.random())
        while time.monotonic() < self._stop_at:
            (kind,) = chance.choices(list(KINDS), weights)
            status = await self._ask(kind, chance)
            if status == 503:
                await asyncio.sleep(RETRY_S * (0.5 + chance.random()))

    async def _bursts(self) -> None:
        """More at once than batch and queue hold."""
        every = self._options.burst_every
        while every and time.monotonic() + every < self._stop_at:
            await asyncio.sleep(every)
            chance = random.Random(time.monotonic())
            await asyncio.gather(*(self._ask("burst", chance) for _ in range(self._limit + 8)))

    async def _attacks(self) -> None:
        for act in itertools.cycle(ATTACKS if self._options.attacks else ()):
            if time.monotonic() + ATTACK_S + PEACE_S > self._stop_at:
                return
            attack = Attack(self._options.url)
            attack.run(act)
            await asyncio.sleep(ATTACK_S)
            await asyncio.to_thread(attack.end)
            self._num_attacks += 1
            await asyncio.sleep(PEACE_S)

    async def _ask(self, kind: str, chance: random.Random) -> int:
        """One request of a kind; what came of it is counted."""
        act = {
            "stream": self._streamed,
            "slow": self._streamed,
            "abort": self._aborted,
            "oversize": self._bad,
            "malformed": self._bad,
            "invalid": self._bad,
        }.get(kind, self._whole)
        try:
            status, fault = await act(self._client_of[kind], kind, chance)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            status, fault = GAVE_UP, repr(error)
        self._tally.add(kind, status, fault)
        return status

    async def _whole(self, client: Client, kind: str, chance: random.Random) -> Outcome:
        question = chance.choice(self._pool)
        body = question.body | (LONG if kind == "deadline" else {})
        reply = await client.post(question.path, json=body)
        if reply.status_code != 200:
            return _refused(kind, reply)
        return 200, _difference(question, text_of(reply.json()["choices"][0]))

    async def _streamed(self, client: Client, kind: str, chance: random.Random) -> Outcome:
        question = chance.choice(self._pool)
        body = question.body | {"stream": True}
        text = ""
        async with client.stream("POST", question.path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return _refused(kind, reply)
            async for piece in _pieces(reply):
                if "error" in piece:
                    is_late = piece["error"].get("code") == "deadline_exceeded"
                    return (504, "") if is_late else (GAVE_UP, f"in the stream: {piece['error']}")
                text += "".join(text_of(choice) for choice in piece["choices"])
                if kind == "slow":
                    await asyncio.sleep(PAUSE_S * chance.random())
        return 200, _difference(question, text)

    async def _aborted(self, client: Client, kind: str, chance: random.Random) -> Outcome:
        """Hang up at any moment; the text is new, so that the store has something to do, too."""
        question = chance.choice(self._pool)
        text = f"{chance.random()} {question.marker} " * chance.choice([1, 20])
        body = {"model": question.body["model"], "prompt": text, "max_tokens": 64}
        body["stream"] = chance.random() < 0.7
        wait_s = chance.choice([0.01, 0.1, 1.0, 5.0])
        try:
            reply = await asyncio.wait_for(client.post(COMPLETIONS, json=body), wait_s)
        except asyncio.TimeoutError:
            return ABORTED, ""
        return (ABORTED, "") if reply.status_code == 200 else _refused(kind, reply)

    async def _bad(self, client: Client, kind: str, chance: random.Random) -> Outcome:
        body = {"model": self._pool[0].body["model"], **HELLO}
        content = {
            "oversize": b'{"prompt": "' + b"x" * OVERSIZE_BYTES + b'"}',
            "malformed": chance.choice(MALFORMED),
            "invalid": json.dumps(body | chance.choice(INVALID)).encode(),
        }[kind]
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            return _refused(kind, await client.post(CHAT, content=content, headers=headers))
        return ABORTED, ""

    async def _watch_memory(self) -> None:
        while self._options.pid is not None and time.monotonic() < self._stop_at:
            self._memory_mb.append(resident_mb(self._options.pid))
            await asyncio.sleep(SAMPLE_S)

    async def _left_behind(self, client: Client) -> list[str]:
        """Requests that the server still holds when nobody waits for them any more."""
        give_up_at = time.monotonic() + SETTLE_S
        while True:
            batch = await _batch(client)
            held = {name: batch[name] for name in ("num_running", "num_waiting")}
            if not any(held.values()):
                return []
            if time.monotonic() > give_up_at:
                return [f"requests were left behind: {held}"]
            await asyncio.sleep(SAMPLE_S)


async def _batch(client: Client) -> dict[str, int]:
    stats = (await client.get("/v1/stats")).raise_for_status().json()
    batch: dict[str, int] = stats["batch"]
    return batch


def _refused(kind: str, reply: httpx.Response) -> Outcome:
    """Status and fault of an answer that is no completion."""
    is_expected = reply.status_code in KINDS[kind].expected
    return reply.status_code, fault_of(reply) or ("" if is_expected else reply.text[:200])


async def _pieces(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream.

    Raises:
        ValueError: it broke off, or an event is not JSON.
    """
    is_whole = False
    async for line in reply.aiter_lines():
        if line == "data: [DONE]":
            is_whole = True
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    if not is_whole:
        raise ValueError("the stream broke off")


def _difference(question: Question, text: str) -> str:
    if text == question.answer:
        return ""
    return f"seed {question.body['seed']}: {text!r} instead of {question.answer!r}"


def growth(samples: Sequence[float]) -> float:
    """Last third against the second third: 0.05 is 5 % more memory."""
    third = len(samples) // 3
    if third == 0:
        raise ValueError(f"{len(samples)} samples: too few for thirds")
    return statistics.mean(samples[2 * third :]) / statistics.mean(samples[third : 2 * third]) - 1


def fault_of(reply: httpx.Response) -> str:
    """What is wrong with an answer other than 200, empty if nothing is."""
    if "Traceback (most recent" in reply.text:
        return f"a stack trace: {reply.text[:200]}"
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = None
    if not message:
        return f"not an OpenAI error: {reply.text[:200]}"
    if reply.status_code == 503 and "retry-after" not in reply.headers:
        return "a 503 without Retry-After"
    return ""
