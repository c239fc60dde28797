"""How a loaded server ends, told to or not, and how the next one starts from its folder."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest

from servers import KVBoostServer, find_program, kvboost_server

pytestmark = [pytest.mark.model, pytest.mark.servers, pytest.mark.alone]

TEXT = sorted(topics.values(), key=len)[-1][:2000]
DRAIN_S = 12  # short answers take less than one second of it on an idle machine
SLACK_S = 30  # for writing and closing, on a busy machine
NUM_EACH = 4  # streams that end by themselves, and that do not
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}


@dataclass
class Ended:
    """What became of a server that was told to end, and of those who read from it."""

    folder: Path
    exit_code: int
    answer: str
    short: list[list[str]]
    endless: list[list[str]]


def flags_of(folder: Path) -> list[str]:
    return ["--dtype", "float32", "--disk-cache-dir", str(folder), "--drain-s", str(DRAIN_S)]


def ask(server: KVBoostServer) -> tuple[str, int]:
    """The answer about the text, and how many tokens of the prompt were known."""
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    usage = reply.json()["usage"]
    return reply.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


class Readers:
    """Clients that read streams, each on a thread of its own."""

    def __init__(self, server: KVBoostServer) -> None:
        self._url = f"{server.url}/v1/completions"
        self._pool = ThreadPoolExecutor(2 * NUM_EACH)
        self._first = threading.Semaphore(0)
        self._all: list[Future[list[str]]] = []

    def read(self, prompt: str, **body: Any) -> Future[list[str]]:
        """The lines of a stream, as far as they come."""
        given = {"prompt": prompt, "stream": True, "temperature": 0, **body}
        self._all.append(self._pool.submit(self._lines, given))
        return self._all[-1]

    def wait_for_first_tokens(self) -> None:
        for _ in self._all:
            assert self._first.acquire(timeout=60)

    def close(self) -> None:
        self._pool.shutdown()

    def _lines(self, body: dict[str, Any]) -> list[str]:
        lines: list[str] = []
        try:
            with httpx.stream("POST", self._url, json=body, timeout=60) as reply:
                for line in filter(None, reply.iter_lines()):
                    if not lines:
                        self._first.release()
                    lines.append(line)
        except httpx.RemoteProtocolError:
            lines.append("broken off")
        return lines


@pytest.fixture(scope="module")
def ended(smol: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """A server with a disk tier, told to end while it streams."""
    folder = tmp_path_factory.mktemp("kv")
    server = KVBoostServer(smol, folder.with_name("log"), *flags_of(folder))
    readers = Readers(server)
    try:
        answer, _ = ask(server)
        endless = [readers.read(TEXT[n:500], **ENDLESS) for n in range(NUM_EACH)]
        short = [readers.read(TEXT[n:300], max_tokens=16, ignore_eos=True)
                 for n in range(NUM_EACH)]  # fmt: skip
        readers.wait_for_first_tokens()
        server.terminate()
        exit_code = server.process.wait(DRAIN_S + SLACK_S)
        lines = [[each.result() for each in group] for group in (short, endless)]
        yield Ended(folder, exit_code, answer, *lines)
    finally:
        server.kill()
        readers.close()


def test_short_answers_are_finished(ended: Ended) -> None:
    assert [lines[-1] for lines in ended.short] == ["data: [DONE]"] * NUM_EACH


def test_answers_that_take_too_long_are_told_so(ended: Ended) -> None:
    for *lines, kind, last in ended.endless:
        assert len(lines) > 4
        assert kind == "event: error"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_the_exit_is_orderly_and_the_folder_sound(ended: Ended) -> None:
    assert ended.exit_code == 0
    verify(ended.folder)


def test_the_next_process_is_warm_and_may_be_killed(
    ended: Ended, smol: str, tmp_path: Path
) -> None:
    server = KVBoostServer(smol, tmp_path / "second", *flags_of(ended.folder))
    readers = Readers(server)
    try:
        answer, cached_tokens = ask(server)
        assert answer == ended.answer
        assert cached_tokens > 300
        for number in range(NUM_EACH):
            readers.read(TEXT[number + 50 :], **ENDLESS)
        readers.wait_for_first_tokens()
    finally:
        server.kill()
        readers.close()
    with kvboost_server(smol, tmp_path / "third", *flags_of(ended.folder)) as third:
        assert ask(third) == (answer, cached_tokens)
    verify(ended.folder)


def verify(folder: Path) -> None:
    command = [find_program("kvboost"), "cache", "verify", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
