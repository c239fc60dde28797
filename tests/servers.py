"""Real servers for the tests, and a proxy that spoils what passes through it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

START_S = 20.0
MODEL_START_S = 120.0
STOP_S = 60.0
LARGE_BYTES = 1000  # more than an answer without a value


def find_program(name: str) -> str:
    """Its path; without it the test is skipped, but in CI it fails."""
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which(name, path=os.pathsep.join([beside_python, os.environ.get("PATH", "")]))
    if path is None:
        reason = f"no {name} on this machine"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process that listens on `port`; it is started again on the same one."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        host: str = "127.0.0.1",
        *,
        start_s: float = START_S,
    ) -> None:
        self._command, self.port, self._host, self._start_s = command, port, host, start_s
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + self._start_s
        while not self._listens():
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.kill()
                raise RuntimeError(f"{self._command[0]} did not start")
            time.sleep(0.02)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._host, self.port), 1):
            return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # it takes a moment

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class KVBoostServer:
    """`python -m kvboost.server` with a model, on any free port.

    `api_key` is what an administrator calls it with, if it has keys.
    """

    def __init__(self, model: str, log: Path, *flags: str, api_key: str = "none") -> None:
        self.log = log
        self.api_key = api_key
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "kvboost.server", "--model", model]
        command += ["--port", self.url.rpartition(":")[2], *flags]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + MODEL_START_S
        while time.monotonic() < give_up_at and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            time.sleep(0.1)
        self.kill()
        pytest.fail(f"the server did not start: {self.log.read_text()[-2000:]}")

    @cached_property
    def model(self) -> str:
        """Its name for clients."""
        name: str = self._get("/v1/models")["data"][0]["id"]
        return name

    def num_requests(self) -> int:
        """Requests that run or wait."""
        batch = self._get("/v1/stats")["batch"]
        return int(batch["num_running"] + batch["num_waiting"])

    def _get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        return httpx.get(self.url + path, headers=headers).raise_for_status().json()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def kvboost_server(
    model: str, log: Path, *flags: str, api_key: str = "none"
) -> Iterator[KVBoostServer]:
    """A server that is ready; at the end of the block it must end well."""
    server = KVBoostServer(model, log, *flags, api_key=api_key)
    try:
        yield server
        server.terminate()
        assert server.process.wait(STOP_S) == 0, log.read_text()[-2000:]
    finally:
        server.kill()


@contextlib.contextmanager
def web_server(answer: Callable[[str, Message], tuple[int, bytes]]) -> Iterator[int]:
    """Serves what `answer` says to a path and headers, as plain text; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers)
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def redis_server(*options: str, tls_folder: Path | None = None) -> Iterator[Server]:
    """A server that keeps nothing; `options` as on its command line."""
    port = free_port()
    listen = ["--port", str(port)]
    if tls_folder is not None:
        certificate, key = make_certificate(tls_folder)
        listen = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        listen += ["--tls-cert-file", certificate, "--tls-key-file", key]
    command = [find_program("redis-server"), *listen, "--bind", "127.0.0.1"]
    server = Server([*command, "--save", "", "--appendonly", "no", *options], port)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def mooncake_master(*options: str) -> Iterator[Server]:
    """A master without segments: stores bring them."""
    port = free_port()
    command = [find_program("mooncake_master"), f"--port={port}", f"--metrics_port={free_port()}"]
    server = Server([*command, *options], port)
    try:
        yield server
    finally:
        server.kill()


def make_certificate(folder: Path) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = [find_program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class Proxy:
    """Passes bytes to a server and back; what comes back can be made late, wrong or short.

    Offsets count the bytes that came back since `spoil`, over all connections.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._random = random.Random(target_port)
        self.spoil()
        self._run(self._accept)

    def spoil(
        self,
        flip_at: int | None = None,
        drop_at: int | None = None,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        flips_values: bool = False,
        cuts_values: bool = False,
    ) -> None:
        """Flip a byte, drop the connection, be late, be slow; without arguments: be honest.

        `flips_values` flips a byte in every large piece, `cuts_values` drops the connection in
        the middle of it.
        """
        with self._lock:
            self._flips_values, self._cuts_values = flips_values, cuts_values
            self._flip_at, self._drop_at = flip_at, drop_at
            self._delay_s, self._bytes_per_s = delay_s, bytes_per_s
            self._num_passed = 0

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            _end(each)
        for thread in self._threads:
            thread.join()
        for each in sockets:
            each.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
            self._run(self._pump, client, server, False)
            self._run(self._pump, server, client, True)

    def _pump(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(self._spoiled(piece) if is_reply else piece)
                if is_reply and self._cuts_values and len(piece) > LARGE_BYTES:
                    break
        _end(source)
        _end(target)

    def _spoiled(self, piece: bytes) -> bytes:
        with self._lock:
            start, self._num_passed = self._num_passed, self._num_passed + len(piece)
            flip_at, drop_at = self._flip_at, self._drop_at
            wait_s = self._delay_s + len(piece) / (self._bytes_per_s or float("inf"))
        time.sleep(wait_s)
        if flip_at is not None and start <= flip_at < start + len(piece):
            piece = _flipped(piece, flip_at - start)
        if len(piece) > LARGE_BYTES and self._flips_values:
            piece = _flipped(piece, self._random.randrange(len(piece)))
        if len(piece) > LARGE_BYTES and self._cuts_values:
            piece = piece[: len(piece) // 2]
        if drop_at is not None and drop_at < start + len(piece):
            raise ConnectionError("dropped on purpose")
        return piece


def _flipped(piece: bytes, at: int) -> bytes:
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
