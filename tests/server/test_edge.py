"""The HTTP edge: what clients may send, and how slowly they may send and read."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn

from kvboost.server.edge import MOST_HEADERS, Limits, end_unread, protocol
from kvboost.server.options import ServerOptions
from waiting import wait_until

SOON_S = 0.6  # the limit of most tests
WAIT_S = 30.0
LARGE_BYTES = 32_000_000
LIMITS = Limits(
    header_bytes=4096, body_bytes=1_000_000, timeout_s=WAIT_S, body_s=WAIT_S, connections=100
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Counts the bytes of a body; some paths answer before that, or with much."""
    num_bytes, has_more = 0, scope["path"] != "/early"
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        has_more = message.get("more_body", False)
    body = b"x" * LARGE_BYTES if scope["path"] == "/large" else str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Server:
    def __init__(self, port: int, server: uvicorn.Server) -> None:
        self.port, self._server = port, server
        self.clients: list[Any] = []

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def block(self, seconds: float) -> None:
        """Keep the loop busy: what connects meanwhile is accepted at once afterwards."""
        connection = next(iter(self._server.server_state.connections))
        connection.loop.call_soon_threadsafe(time.sleep, seconds)

    def connect(self, sent: bytes = b"", **options: int) -> socket.socket:
        client = socket.socket()
        self.clients.append(client)
        client.settimeout(WAIT_S)
        for name, value in options.items():
            client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        client.connect(("127.0.0.1", self.port))
        client.sendall(sent)
        return client

    def connection(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        self.clients.append(connection)
        return connection

    def is_alive(self) -> bool:
        connection = self.connection()
        connection.request("GET", "/")
        is_right = connection.getresponse().read() == b"0"
        connection.close()
        return is_right


@contextmanager
def serving(**limits: Any) -> Iterator[Server]:
    bound = socket.socket()
    chosen = Limits(**{**LIMITS.__dict__, **limits})
    end_unread(bound, chosen.timeout_s)
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=protocol(chosen), lifespan="off", log_level="error", timeout_keep_alive=30
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    used = Server(bound.getsockname()[1], server)
    try:
        yield used
    finally:
        for client in used.clients:
            client.close()
        server.force_exit = server.should_exit = True
        thread.join(WAIT_S)
        bound.close()


def said(client: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    pieces = []
    try:
        while piece := client.recv(1 << 20):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def wait_until_gone(server: Server) -> None:
    wait_until(lambda: server.num_connections == 0, WAIT_S)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nX-A: ", b"a" * 65536),
        (b"GET /large HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nX-A: ", b"a" * 65536),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n" * 9999),
    ],
    ids=["a head", "a head behind a running request", "a body"],
)
def test_what_has_no_end_is_cut_off(begin: bytes, piece: bytes) -> None:
    with serving() as server:
        client, num_sent = server.connect(begin), 0
        with pytest.raises(OSError):
            for _ in range(10_000):
                client.sendall(piece)
                num_sent += len(piece)
        assert num_sent < 16 << 20
        wait_until_gone(server)
        assert server.is_alive()


def test_a_head_that_is_too_large_is_told_so() -> None:
    with serving() as server:
        head = b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 5000
        answer = said(server.connect(head))
        assert answer.startswith(b"HTTP/1.1 431 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "4096 bytes" in error["message"] and error["type"] == "invalid_request_error"
        fitting = b"GET / HTTP/1.1\r\nConnection: close\r\nX-A: " + b"a" * 4000 + b"\r\n\r\n"
        assert said(server.connect(fitting)).startswith(b"HTTP/1.1 200 ")


def test_too_many_headers_are_refused() -> None:
    with serving(header_bytes=1 << 20) as server:
        head = b"GET / HTTP/1.1\r\nConnection: close\r\n"
        few = b"".join(b"A%d: b\r\n" % number for number in range(MOST_HEADERS - 1))
        assert said(server.connect(head + few + b"\r\n")).startswith(b"HTTP/1.1 200 ")
        many = few + b"B: c\r\n"
        assert b"431" in said(server.connect(head + many + b"\r\n"))


@pytest.mark.parametrize("pause_s", [0, 0.1])
def test_an_offer_of_http_2_costs_no_body(pause_s: float) -> None:
    """As Java's clients make it with every request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with serving() as server:
        client = server.connect(b"POST / HTTP/1.1\r\n" + offer + b"Content-Length: 19\r\n\r\n")
        time.sleep(pause_s)
        client.sendall(b"\r\nUpgrade: h2c body")
        assert client.recv(1000).endswith(b"\r\n\r\n19")
        client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert said(client).endswith(b"\r\n\r\n0")


def test_an_offer_in_two_pieces_costs_no_body() -> None:
    head = b"POST / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 5\r\n\r\n"
    first = head.index(b"Upgrade")
    with serving() as server:
        for cut in range(first - 2, first + 14):
            client = server.connect(head[:cut])
            time.sleep(0.03)
            client.sendall(head[cut:] + b"hello")
            assert client.recv(1000).endswith(b"\r\n\r\n5"), cut


def test_answers_that_nobody_reads_count_as_connections() -> None:
    ask = b"GET /large HTTP/1.1\r\nConnection: close\r\n\r\n"
    with serving(connections=16) as server:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(60):
            with suppress(OSError):
                server.connect(ask, SO_RCVBUF=4096)
            time.sleep(0.02)
        assert len(os.listdir("/proc/self/fd")) - before - len(server.clients) <= 20


def test_a_burst_of_connections_stays_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio's own loop, which accepts many in one turn."""
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, loop="asyncio"))
    with serving(connections=16) as server:
        for _ in range(3):
            server.connect()
            wait_until(lambda: server.num_connections > 0)
            server.block(0.2)
            last = [server.connect() for _ in range(100)][-1]
            last.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert last.recv(1000)  # all before it are accepted by now
            wait_until(lambda: server.num_connections <= 16)


def test_a_body_may_come_with_its_head() -> None:
    with serving() as server:
        connection = server.connection()
        for _ in range(3):
            connection.request("POST", "/", b"y" * 900_000)
            assert connection.getresponse().read() == b"900000"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX-A: "], ids=["nothing", "half"])
def test_a_head_has_a_time_limit(sent: bytes) -> None:
    with serving(timeout_s=SOON_S) as server:
        client = server.connect(sent)
        answer = said(client)
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
        wait_until_gone(server)


def test_a_head_that_comes_drop_by_drop_has_the_same_limit() -> None:
    with serving(timeout_s=SOON_S) as server:
        client = server.connect(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"A: b\r\n")
                time.sleep(0.05)
        wait_until_gone(server)


@pytest.mark.parametrize(
    ("piece", "body_s"),
    [(b"", WAIT_S), (b"d", WAIT_S), (400 * b"d", SOON_S)],
    ids=["stalls", "drips", "lasts"],
)
def test_a_body_has_a_time_limit(piece: bytes, body_s: float) -> None:
    with serving(timeout_s=SOON_S, body_s=body_s) as server:
        client = server.connect(b"POST / HTTP/1.1\r\nContent-Length: 9000\r\n\r\nabc")
        client.settimeout(0.1)
        answer, until = b"", time.monotonic() + WAIT_S
        while not answer and time.monotonic() < until:
            client.send(piece)
            with suppress(TimeoutError):
                answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_keeps_coming_may_take_longer() -> None:
    with serving(timeout_s=SOON_S) as server:
        client = server.connect(b"POST / HTTP/1.1\r\nContent-Length: 9000\r\n\r\n")
        for _ in range(9):
            client.sendall(1000 * b"d")
            time.sleep(SOON_S / 4)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    with serving(timeout_s=SOON_S) as server:
        for _ in range(5):
            server.connect(b"GET /large HTTP/1.1\r\n\r\n", SO_RCVBUF=4096)
        wait_until_gone(server)
        assert server.is_alive()


def test_a_slow_reader_that_takes_something_is_served() -> None:
    with serving(timeout_s=2 * SOON_S) as server:
        client = server.connect(b"GET /large HTTP/1.1\r\nConnection: close\r\n\r\n")
        num_read, until = 0, time.monotonic() + 4 * SOON_S
        while time.monotonic() < until:
            num_read += len(client.recv(1 << 18))
            time.sleep(0.02)
        assert num_read + len(said(client)) > LARGE_BYTES


def test_beyond_the_limit_who_waited_longest_gives_way() -> None:
    with serving(connections=4) as server:
        first = server.connect()
        time.sleep(0.2)
        others = [server.connect() for _ in range(3)]
        time.sleep(0.2)
        assert server.is_alive()
        assert said(first) == b""
        others[0].sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert said(others[0]).endswith(b"0")


def test_a_connection_lives_on_after_an_early_answer() -> None:
    with serving(timeout_s=SOON_S) as server:
        client = server.connect(b"POST /early HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"abcGET / HTTP/1.1\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until_gone(server)


def test_there_are_no_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    options = ServerOptions(model="m")
    assert Limits.of(options).connections < 256 - 64
    monkeypatch.setattr("resource.getrlimit", lambda _: (100_000, 100_000))
    assert Limits.of(options).connections == options.max_connections
