"""Runs `benchmarks/run.py fleet` in a process of its own, with Ray, OpenAI's client and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import ray
import redis
from ray import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.bench.texts import Dealer
from kvboost.fleet.app import app
from servers import Server, free_port, mooncake_master, redis_server

DOCUMENTS, DOCUMENT_TOKENS = 24, 120
SYSTEM_TOKENS, TURN_TOKENS, CONVERSATIONS = 90, 30, 40
NEW_TOKENS = 8
PARTS_OF_MIX = 6  # one of them is asked again and again while things die
RAG_SHARE = 0.6
REPLICA_LOG = "/logs/serve/replica_default_EngineReplica_"
WAIT_S = 180.0


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    error: str = ""


def main() -> None:
    task = json.loads(sys.argv[1])
    mix = requests(task["model"], task["requests"])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    fleet = Fleet(task["model"], task["dtype"], port, task["clients"])
    rows: list[dict[str, Any]] = []
    try:
        for part in task["parts"]:
            rows += PARTS[part](fleet, mix)
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps({"rows": rows}))


def requests(model: str, number: int) -> list[list[dict[str, str]]]:
    """Conversations that grow, and questions about two of some documents, popular ones more often.

    The same for everybody, in one order.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    chance = random.Random(9)
    dealer = Dealer(9, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids))
    documents = [dealer.prose(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    popular = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    system = {"role": "system", "content": dealer.prose(SYSTEM_TOKENS)}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(CONVERSATIONS)]
    mix = []
    for _ in range(number):
        if chance.random() < RAG_SHARE:
            first, second = chance.choices(range(DOCUMENTS), popular, k=2)
            context = f"{documents[first]}\n\n{documents[second]}"
            mix.append([{"role": "user", "content": f"{context}\n\n{dealer.sentence()} Is it so?"}])
        else:
            talk = chance.choice(talks)
            talk.append({"role": "user", "content": dealer.prose(TURN_TOKENS)})
            mix.append(list(talk))
            talk.append({"role": "assistant", "content": dealer.sentence()})
    return mix


class Fleet:
    """The application on Ray Serve, and clients of it."""

    def __init__(self, model: str, dtype: str, port: int, num_clients: int) -> None:
        self.model, self._dtype = model, dtype
        self._url = f"http://127.0.0.1:{port}/v1"
        self._num_clients = num_clients

    def start(self, model: str, **arguments: Any) -> None:
        """Deploy, or put another version in place of what runs, and wait until it is there."""
        settings = {"model": model, "served_model_name": "m", "dtype": self._dtype, **arguments}
        serve.run(app({name: str(value) for name, value in settings.items()}), name="default")

    def stop(self) -> None:
        serve.delete("default")

    def ask(
        self,
        mix: Sequence[list[dict[str, str]]],
        *,
        stream: bool = True,
        also: Awaitable[Any] | None = None,
    ) -> list[Answer]:
        """Send requests by several clients, in order; `also` runs beside them."""

        async def work() -> list[Answer]:
            free = asyncio.Semaphore(self._num_clients)

            async def in_turn(client: openai.AsyncOpenAI, messages: Any) -> Answer:
                async with free:
                    return await _asked(client, messages, is_stream=stream)

            async with openai.AsyncOpenAI(
                base_url=self._url, api_key="none", timeout=120
            ) as client:
                asked = asyncio.gather(*(in_turn(client, messages) for messages in mix))
                return (await asyncio.gather(asked, *([also] if also else [])))[0]

        return asyncio.run(work())


async def _asked(client: openai.AsyncOpenAI, messages: Any, *, is_stream: bool) -> Answer:
    started = time.perf_counter()
    first_s, text = 0.0, ""
    body = {"model": "m", "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        reply: Any = await client.chat.completions.create(**body)
        usage = None if is_stream else reply.usage
        if not is_stream:
            text = reply.choices[0].message.content or ""
        else:
            async for chunk in reply:
                if chunk.choices and chunk.choices[0].delta.content:
                    first_s = first_s or time.perf_counter() - started
                    text += chunk.choices[0].delta.content
                usage = chunk.usage or usage
    except openai.APIError as error:
        return Answer(text, first_s, 0, 0, getattr(error, "code", None) or type(error).__name__)
    cached = usage.prompt_tokens_details.cached_tokens
    first_s = first_s if is_stream else time.perf_counter() - started
    return Answer(text, first_s, usage.prompt_tokens, cached)


def figures(answers: Sequence[Answer], expected: Sequence[str] | None = None) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    row = {
        "requests": len(answers),
        "answered": len(good),
        "errors": sorted({answer.error for answer in answers if answer.error}),
        "reused": round(
            sum(answer.cached_tokens for answer in good)
            / max(1, sum(answer.prompt_tokens for answer in good)),
            4,
        ),
        "p50_ms": round(1e3 * statistics.median(answer.ttft_s for answer in good)),
        "p95_ms": round(1e3 * statistics.quantiles((a.ttft_s for a in good), n=20)[-1]),
    }
    if expected is not None:
        pairs = zip(answers, expected, strict=True)
        row["other_texts"] = sum(not each.error and each.text != text for each, text in pairs)
    return row


def routing(fleet: Fleet, mix: Sequence[Any], *, reuse: str) -> list[dict[str, Any]]:
    """The same requests to one replica and to two, by both routers, with and without a tier."""
    rows: list[dict[str, Any]] = []
    alone: list[Answer] = []
    with redis_server() as store, mooncake_master() as master:
        redis_url = f"redis://127.0.0.1:{store.port}"
        mooncake_url = f"mooncake://127.0.0.1:{master.port}"
        for name, replicas, route, url in (
            ("one replica", 1, "reuse", None),
            ("two, our router, Redis", 2, "reuse", redis_url),
            ("two, Ray's router, Redis", 2, "default", redis_url),
            ("two, our router, Mooncake", 2, "reuse", mooncake_url),
            ("two, our router, no tier", 2, "reuse", None),
            ("two, Ray's router, no tier", 2, "default", None),
        ):
            redis.Redis(port=store.port).flushall()
            tier = {"cache_url": url} if url else {}
            fleet.start(fleet.model, replicas=replicas, routing=route, reuse=reuse, **tier)
            answers = fleet.ask(mix)
            alone = alone or answers
            row = {"setup": name, "reuse": reuse} | figures(answers, [each.text for each in alone])
            row["of_one_replica"] = round(row["reused"] / (rows or [row])[0]["reused"], 3)
            rows.append(row)
            _tell(row)
            fleet.stop()
    return rows


def faults(fleet: Fleet, mix: Sequence[Any]) -> list[dict[str, Any]]:
    """Deaths under load, in exact mode and fp32, where every text can be compared."""
    rows: list[dict[str, Any]] = []
    with redis_server() as store:
        url = f"redis://127.0.0.1:{store.port}"
        fleet.start(fleet.model, replicas=2, reuse="exact", cache_url=url)
        part = list(mix[: len(mix) // PARTS_OF_MIX])
        expected = [each.text for each in fleet.ask(part, stream=False)]

        def phase(name: str, event: Callable[[], None], *, stream: bool = False) -> None:
            answers = fleet.ask(part, stream=stream, also=_later(event))
            row = {"phase": name, "stream": stream} | figures(answers, expected)
            rows.append(row)
            _tell(row)

        phase("nothing", lambda: None)
        phase("a replica killed", kill_replica)
        wait_for_replicas(2)
        phase("recovered", lambda: None)
        phase("the store killed", store.kill)
        phase("a replica killed, no store", kill_replica)
        wait_for_replicas(2)
        store.start()
        phase("store back", lambda: None)
        phase("both killed", lambda: _both(store))
        wait_for_replicas(2)
        store.start()
        phase("all back", lambda: None)
        phase("a replica killed under streams", kill_replica, stream=True)
        wait_for_replicas(2)
        fleet.stop()
    return rows


def _both(store: Server) -> None:
    store.kill()
    kill_replica()


def update(fleet: Fleet, mix: Sequence[Any]) -> list[dict[str, Any]]:
    """Another model under the same name while requests run."""
    rows: list[dict[str, Any]] = []
    part = list(mix[: len(mix) // PARTS_OF_MIX])
    size = ("--maxmemory", "150mb", "--maxmemory-policy", "allkeys-lru")
    with changed_model(fleet.model) as changed, redis_server(*size) as store:
        url = f"redis://127.0.0.1:{store.port}"
        arguments = {"replicas": 2, "reuse": "exact", "cache_url": url}
        fleet.start(changed, replicas=1, reuse="off")
        new = [each.text for each in fleet.ask(part, stream=False)]
        fleet.stop()
        fleet.start(fleet.model, **arguments)
        old = [each.text for each in fleet.ask(part, stream=False)]
        client = redis.Redis(port=store.port)
        before = set(client.keys())

        def redeploy() -> None:
            fleet.start(changed, **arguments)

        during = fleet.ask(part, stream=False, also=_later(redeploy))
        after = fleet.ask(part, stream=False)
        again = fleet.ask(part, stream=False)
        neither = sum(
            not each.error and each.text not in texts
            for each, *texts in zip(during, old, new, strict=True)
        )
        rows.append({"phase": "during", "neither_text": neither} | figures(during))
        rows.append({"phase": "after"} | figures(after, new))
        rows.append({"phase": "again"} | figures(again, new))
        for row in rows:
            row["differ"] = sum(a != b for a, b in zip(old, new, strict=True))
            row["old_keys_left"] = round(len(before & set(client.keys())) / len(before), 3)
            _tell(row)
        fleet.stop()
    return rows


@contextlib.contextmanager
def changed_model(folder: str) -> Iterator[str]:
    """The same model after a little more training, so to say."""
    with tempfile.TemporaryDirectory() as target:
        shutil.copytree(folder, target, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(folder)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data *= 1.15
        model.save_pretrained(target)
        yield target


async def _later(event: Callable[[], None]) -> None:
    await asyncio.sleep(2)
    await asyncio.to_thread(event)


def kill_replica() -> None:
    """End the process of a replica of this run, which is one that writes a replica's log."""
    log = f"/{ray.get_runtime_context().get_session_name()}{REPLICA_LOG}"
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if log in os.readlink(each):
                os.kill(int(each.parts[2]), signal.SIGKILL)
                return
    raise RuntimeError("no process of a replica")


def wait_for_replicas(number: int) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        states = serve.status().applications["default"].deployments["EngineReplica"].replica_states
        if states.get("RUNNING", 0) == number:
            return
        time.sleep(0.2)
    raise RuntimeError("the replica did not come back")


def _tell(row: dict[str, Any]) -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)


PARTS: dict[str, Callable[[Fleet, Sequence[Any]], list[dict[str, Any]]]] = {
    "exact": partial(routing, reuse="exact"),
    "auto": partial(routing, reuse="auto"),
    "faults": faults,
    "update": update,
}

if __name__ == "__main__":
    main()
