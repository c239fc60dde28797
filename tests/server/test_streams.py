"""A listening server: clients that go, readers that are slow, and the end of the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fake_serving import WAIT_S, Stand
from kvboost.errors import KVBoostError
from waiting import wait_until

BODY = {"prompt": "hi"}


@pytest.fixture
def stand() -> Stand:
    return Stand(drain_s=0.2)


@pytest.fixture
def url(stand: Stand) -> Iterator[str]:
    with stand.listening() as found:
        yield found + "/v1/completions"


def hold_after_one(stand: Stand) -> None:
    """Each answer says its first piece, and no more until `steps` is set."""
    stand.engine.num_free = 1
    stand.engine.steps.clear()


def data(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


def test_tokens_come_one_by_one(stand: Stand, url: str) -> None:
    hold_after_one(stand)
    with httpx.stream("POST", url, json=BODY | {"stream": True}, timeout=WAIT_S) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert data(next(lines))["choices"][0]["text"] == "Hel"
        assert not stand.engine.tickets[0].future.done()
        stand.engine.steps.set()
        assert list(lines)[-1] == "data: [DONE]"
    wait_until(lambda: len(stand.telemetry.records) == 1)


@pytest.mark.parametrize("num_answers", [1, 3])
def test_work_stops_when_the_reader_of_a_stream_goes(
    stand: Stand, url: str, num_answers: int
) -> None:
    hold_after_one(stand)
    body = BODY | {"stream": True, "n": num_answers}
    with httpx.Client(timeout=WAIT_S) as client:
        with client.stream("POST", url, json=body) as reply:
            next(reply.iter_lines())
        wait_until(lambda: all(each.is_cancelled for each in stand.engine.tickets))
    assert len(stand.engine.tickets) == num_answers
    wait_until(lambda: [each.status for each in stand.telemetry.records] == [499])
    assert stand.telemetry.records[0].finish_reason == "cancelled"


@pytest.mark.parametrize("is_stream", [False, True])
def test_work_stops_when_a_client_goes_before_its_answer(
    stand: Stand, url: str, is_stream: bool
) -> None:
    stand.engine.steps.clear()
    port = int(url.split(":")[2].split("/")[0])
    content = json.dumps(BODY | {"stream": is_stream, "n": 2})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        wait_until(lambda: len(stand.engine.tickets) == 2)
    wait_until(lambda: all(each.is_cancelled for each in stand.engine.tickets))
    wait_until(lambda: len(stand.app.state.running) == 0)


def test_the_engine_does_not_wait_for_a_slow_reader(stand: Stand, url: str) -> None:
    stand.engine.pieces = ["x" * 10_000] * 900
    with httpx.Client(timeout=WAIT_S) as client:
        body = BODY | {"stream": True, "max_tokens": 900}
        with client.stream("POST", url, json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            first = data(next(lines))
            wait_until(lambda: stand.engine.tickets[0].future.done())
            rest = [data(line) for line in lines if line != "data: [DONE]"]
    said = "".join(each["choices"][0]["text"] for each in [first, *rest])
    assert said == "x" * 9_000_000
    assert len(rest) < 900  # what waited came joined


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    stand = Stand(drain_s=0.2, client_timeout_s=0.1)
    stand.engine.pieces = ["x" * 100_000] * 900
    with stand.listening() as url, httpx.Client(timeout=WAIT_S) as client:
        body = BODY | {"stream": True, "max_tokens": 900}
        with client.stream("POST", f"{url}/v1/completions", json=body):
            wait_until(lambda: len(stand.telemetry.records) == 1)
    assert stand.telemetry.records[0].status == 499


def test_a_server_that_ends_lets_streams_finish(capfd: pytest.CaptureFixture[str]) -> None:
    stand = Stand(drain_s=WAIT_S)
    with stand.listening() as url, httpx.Client(timeout=WAIT_S) as client:
        body = BODY | {"stream": True}
        hold_after_one(stand)
        with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            stand.server.should_exit = True
            wait_until(lambda: stand.app.state.running.is_draining)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/ready")
            stand.engine.steps.set()
            assert list(lines)[-1] == "data: [DONE]"
    told = f"shutting down: waiting up to {WAIT_S:g} s for 1 request (Ctrl+C again to stop now)\n"
    assert told in capfd.readouterr().err


def test_what_takes_longer_than_the_drain_is_told_so() -> None:
    stand = Stand(drain_s=0.1)
    replies: list[httpx.Response] = []
    with stand.listening() as url, httpx.Client(timeout=WAIT_S) as client:
        path = f"{url}/v1/completions"
        hold_after_one(stand)
        with client.stream("POST", path, json=BODY | {"stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            plain = threading.Thread(target=lambda: replies.append(httpx.post(path, json=BODY)))
            plain.start()
            wait_until(lambda: len(stand.engine.tickets) == 2)
            stand.server.should_exit = True
            last = list(lines)[-1]
            assert data(last)["error"]["code"] == "shutting_down"
            plain.join(WAIT_S)
    assert replies[0].status_code == 503
    assert replies[0].headers["retry-after"]
    assert all(each.is_cancelled for each in stand.engine.tickets)


def test_a_text_that_is_being_warmed_does_not_hold_up_the_end(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def warm(*_: Any, **__: Any) -> None:
        begun.set()
        wait_until(lambda: stand.engine.is_closed)
        raise KVBoostError("the engine is closed")

    def ask(url: str) -> None:
        replies.append(httpx.post(f"{url}/v1/warm", json={"text": "a"}, timeout=WAIT_S))

    replies: list[httpx.Response] = []
    monkeypatch.setattr(stand.engine, "warm", warm)
    with stand.listening() as url:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        assert begun.wait(WAIT_S)
    asking.join(WAIT_S)
    assert stand.engine.is_closed
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "shutting_down"


def test_a_second_interrupt_ends_at_once() -> None:
    stand = Stand(drain_s=10 * WAIT_S)
    with stand.listening() as url, httpx.Client(timeout=WAIT_S) as client:
        hold_after_one(stand)
        with client.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            for _ in range(2):
                stand.server.handle_exit(signal.SIGINT, None)
            assert data(list(lines)[-1])["error"]["code"] == "shutting_down"
    assert stand.engine.is_closed


def test_a_server_that_drains_takes_nothing_more(stand: Stand, url: str) -> None:
    stand.app.state.running.is_draining = True
    ready = httpx.get(url.replace("/v1/completions", "/ready"))
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
    assert httpx.post(url, json=BODY).status_code == 503
    assert httpx.get(url.replace("/v1/completions", "/health")).status_code == 200


PROGRAM = """
import socket, sys
from fake_serving import FakeEngine, FakeGrammars, MODEL
from kvboost.server.keys import KeyRing
from kvboost.server.options import ServerOptions
from kvboost.server.serve import serve
engine, bound = FakeEngine(), socket.create_server(("127.0.0.1", 0))
engine.steps.clear()
options = ServerOptions(model="fake", drain_s=0.1)
code = serve(engine, options, FakeGrammars(), model=MODEL, keys=KeyRing(), bound=bound)
print("closing", flush=True)
sys.exit(code)
"""


def test_sigterm_under_load_ends_in_order_with_code_zero() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1] + "/v1/completions"
        status: list[int] = []
        ask = lambda: status.append(httpx.post(url, json=BODY, timeout=WAIT_S).status_code)  # noqa: E731
        asking = threading.Thread(target=ask)
        asking.start()
        stats = url.replace("completions", "stats")
        wait_until(lambda: httpx.get(stats).json()["requests"]["num_now"] == 1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT_S)
        asking.join(WAIT_S)
    assert (process.returncode, out, status) == (0, "closing\n", [503])
