"""A real fleet: Ray Serve, two replicas of a real model, a shared tier, and OpenAI's client."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvboost.fleet.app import STATS_PERIOD_S
from servers import find_program, free_port, redis_server

pytestmark = [pytest.mark.model, pytest.mark.servers]

START_S = 480.0  # beside other tests
STOP_S = 60.0
PLACES = ("reading room", "boat house", "greenhouse", "observatory", "print shop", "bakery")
RULES = (
    "Members of the {0} may borrow six things for three weeks; what nobody has reserved can be "
    "kept for two weeks more. The {0} opens at nine on weekdays and at eleven on Saturdays. Maps "
    "and old newspapers stay in the {0} and are handed out at the desk on the second floor, where "
    "bags have to be left in the lockers. In the {0} copies cost ten cents a page, scans are free."
)
DOCUMENTS = [f"About the {each}. {RULES.format(each)}" for each in PLACES]


class Fleet:
    """`serve run` with a config file, on a cluster of its own."""

    def __init__(self, model: str, cache_url: str, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.folder = folder
        arguments = {"model": model, "replicas": 2, "dtype": "float32", "cache_url": cache_url}
        arguments["num_cpus"] = 0.5  # a thread each, and two fit on one core
        arguments |= {"max_cache_bytes": "256MB", "tier_deadline_ms": 20_000, "chunk_size": 32}
        application = {"name": "kvboost", "import_path": "kvboost.fleet.app:app"}
        config = {
            "http_options": {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])},
            "applications": [{**application, "route_prefix": "/", "args": arguments}],
        }
        (folder / "config.yaml").write_text(json.dumps(config))  # which is YAML
        environ = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [find_program("serve"), "run", "--address=local", str(folder / "config.yaml")],
                env=os.environ | environ,
                stdout=log,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        """Until both replicas answer."""
        give_up_at = time.monotonic() + START_S
        seen: set[str] = set()
        while len(seen) < 2 and time.monotonic() < give_up_at and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                reply = httpx.get(f"{self.url}/ready", timeout=60)
                seen |= {reply.headers.get("x-kvboost-replica", "")} - {""}
            time.sleep(0.05)
        assert len(seen) == 2, (self.folder / "log").read_text()[-3000:]

    def kill(self, deployment: str, replica: str = "") -> None:
        """End the process of a replica, which is the one that writes the replica's log."""
        log = f"/replica_kvboost_{deployment}_{replica}"
        for each in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                target = os.readlink(each)
                if target.startswith(str(self.folder)) and log in target:
                    os.kill(int(each.parts[2]), signal.SIGKILL)
                    return
        pytest.fail(f"no process of {deployment} {replica}")

    def stop(self) -> None:
        """End it as a user would, and whatever is left of it then.

        Ray takes its time where a replica is just being replaced. Its processes have the folder in
        their command lines.
        """
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.process.kill()
        self.process.wait()
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in each.read_bytes():
                    os.kill(int(each.parts[2]), signal.SIGKILL)


@pytest.fixture(scope="module")
def fleet(smol: str) -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="kv-ray-"))  # short: there are sockets in it
    with redis_server() as redis:
        fleet = Fleet(smol, f"redis://127.0.0.1:{redis.port}", folder)
        try:
            fleet.wait_until_ready()
            yield fleet
        finally:
            fleet.stop()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def said(chunk: Any) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


class Asker:
    """Asks about documents, always in the same way."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self._client = client
        self._given = {"model": model, "max_tokens": 8, "temperature": 0}

    def ask(self, document: str, question: str = "What do copies cost?") -> tuple[str, int, str]:
        """The answer, how many tokens of the prompt were known, and who answered."""
        raw = self._client.chat.completions.with_raw_response.create(
            **self._given, messages=_messages(document, question)
        )
        reply = raw.parse()
        known = reply.usage.prompt_tokens_details.cached_tokens
        return reply.choices[0].message.content, known, raw.headers["x-kvboost-replica"]

    def stream(self, document: str, **given: object) -> openai.Stream:
        question = _messages(document, "What do copies cost?")
        return self._client.chat.completions.create(
            **self._given | given, messages=question, stream=True
        )


def _messages(document: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def asker(client: openai.OpenAI, model: str) -> Asker:
    return Asker(client, model)


def test_a_question_that_was_asked_before_is_answered_alike_from_what_is_stored(
    asker: Asker,
) -> None:
    first, second = asker.ask(DOCUMENTS[0]), asker.ask(DOCUMENTS[0])
    assert first[0] and second[0] == first[0]
    assert first[1] == 0 and second[1] > 100


def test_a_stream_says_the_same(asker: Asker) -> None:
    pieces = [each.choices[0].delta.content or "" for each in asker.stream(DOCUMENTS[0])]
    assert len(pieces) > 4
    assert "".join(pieces) == asker.ask(DOCUMENTS[0])[0]


def test_questions_about_a_document_go_to_who_has_read_it(asker: Asker) -> None:
    questions = ("When does it open?", "Who may borrow?", "Where is the desk?")
    for document in DOCUMENTS[1:3]:
        answers = [asker.ask(document, each) for each in questions]
        assert len({replica for *_, replica in answers}) == 1
        assert all(known > 50 for _, known, _ in answers[1:])


@pytest.mark.long
def test_a_new_ingress_learns_from_the_replicas_what_they_hold(asker: Asker, fleet: Fleet) -> None:
    before = [asker.ask(document)[2] for document in DOCUMENTS]
    time.sleep(2 * STATS_PERIOD_S)
    fleet.kill("Ingress")
    fleet.wait_until_ready()
    assert [asker.ask(document)[2] for document in DOCUMENTS] == before


def test_errors_are_openais(client: openai.OpenAI, model: str, fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=[], temperature=9)
    assert wrong.value.type == "invalid_request_error" and wrong.value.code
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=_messages("a", "b"))
    large = httpx.post(f"{fleet.url}/v1/completions", content=b"x" * (9 << 20))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    elsewhere = httpx.get(f"{fleet.url}/v1/models", headers={"host": "evil.example"})
    assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (403, "wrong_host")


def test_a_client_that_leaves_frees_its_replica(asker: Asker, fleet: Fleet) -> None:
    stream = asker.stream(DOCUMENTS[0], max_tokens=3000, extra_body={"ignore_eos": True})
    next(iter(stream))
    replica = stream.response.headers["x-kvboost-replica"]
    stream.close()
    give_up_at = time.monotonic() + 20
    num_running = 1
    while num_running and time.monotonic() < give_up_at:
        reply = httpx.get(f"{fleet.url}/v1/stats")
        if reply.headers["x-kvboost-replica"] == replica:
            num_running = reply.json()["batch"]["num_running"]
    assert num_running == 0


@pytest.mark.long
def test_when_a_replica_is_killed_the_other_answers_what_it_was_asked(
    asker: Asker, fleet: Fleet
) -> None:
    before = [asker.ask(document)[0] for document in DOCUMENTS]
    long = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
    undisturbed = [said(chunk) for chunk in asker.stream(DOCUMENTS[0], **long)]
    stream = asker.stream(DOCUMENTS[0], **long)
    chunks = [next(iter(stream))]
    with ThreadPoolExecutor(len(DOCUMENTS)) as pool:
        asking = [pool.submit(asker.ask, document) for document in DOCUMENTS]
        time.sleep(0.3)
        killed = stream.response.headers["x-kvboost-replica"]
        fleet.kill("EngineReplica", killed)
        answers = [each.result() for each in asking]
    assert [text for text, *_ in answers] == before
    assert {replica for *_, replica in answers} != {killed}
    # All that the lost one had read is in the shared tier.
    assert all(known > 100 for _, known, _ in answers)
    # A stream that had begun goes on as if nothing had happened.
    chunks += stream
    assert [said(chunk) for chunk in chunks] == undisturbed
    assert len({chunk.id for chunk in chunks}) == 1
    fleet.wait_until_ready()
