"""The HTTP edge: limits on what clients send, and on how slowly they send and read (ADR 41)."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvboost.server.options import ServerOptions
from kvboost.server.problems import Problem

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_HEADERS = 100
SPARE_BODY_BYTES = 64 << 10  # for chunk sizes and trailers, which are no part of a body
LEAST_BYTES_PER_S = 500  # of a body
RESERVED_DESCRIPTORS = 96  # for the model, tiers and logs
LEAST_CONNECTIONS = 16

# Clients that prefer HTTP/2, Java's among them, offer it with every request. The parser would take
# the end of such a head for the end of the request, and lose its body.
OFFER = re.compile(rb"(?i)(?<=\r\n)upgrade:(?=[^\r\n]*\bh2c\b)")

Phase = Literal["idle", "head", "body", "answer"]


@dataclass(frozen=True)
class Limits:
    """The limits of a connection."""

    header_bytes: int
    body_bytes: int
    timeout_s: float  # for a whole head, the next piece of a body, the next read of a response
    body_s: float  # for a whole body
    connections: int

    @classmethod
    def of(cls, options: ServerOptions) -> Limits:
        """The limits of the options, with no more connections than the process may open."""
        connections = options.max_connections
        if resource is not None:
            descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if descriptors != resource.RLIM_INFINITY:
                connections = min(connections, descriptors - RESERVED_DESCRIPTORS)
        return cls(
            header_bytes=options.max_header_bytes,
            body_bytes=options.max_body_bytes,
            timeout_s=options.client_timeout_s,
            body_s=options.request_deadline_s,
            connections=max(LEAST_CONNECTIONS, connections),
        )


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol factory for uvicorn."""
    return cast("type[asyncio.Protocol]", partial(Connection, limits))


def end_unread(bound: socket.socket, timeout_s: float) -> None:
    """Let the kernel close connections whose peer reads nothing for this long."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(1e3 * timeout_s)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class Connection(HttpToolsProtocol):
    """A connection that ends when it asks for too much, or is too slow."""

    def __init__(self, limits: Limits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._phase: Phase = "head"
        self._phase_bytes = 0
        self.since = self.loop.time()  # of the phase, or of the last piece of a body
        self._phase_since = self.since
        self._refusal = (400, "")
        self._unfinished = b""  # line of a head
        self.is_aborted = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def is_answering(self) -> bool:
        """Whether a whole request has arrived and its response is not complete."""
        return self._phase == "answer"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Stay within the limit: abort the connection that has waited longest."""
        super().connection_made(transport)
        self._check_later("slow", self._limits.timeout_s, self._check_pace)
        connections = cast("set[Connection]", self.connections)
        alive = [each for each in connections if not each.is_aborted]
        if len(alive) > self._limits.connections:
            waiting = [each for each in alive if not each.is_answering]
            longest = min(waiting, key=lambda each: each.since)
            longest.is_aborted = True
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; those of a head in slices, so that none is parsed beyond the limit."""
        view = memoryview(data)
        while view and not self.transport.is_closing():
            if self._phase == "idle":
                self._enter("head")
            size = len(view)
            if self._phase != "body":  # beside an answer, they are the head of the next request
                size = self._limits.header_bytes - self._phase_bytes + 1
            self._take(bytes(view[:size]))
            view = view[size:]

    def _without_h2c(self, data: bytes) -> bytes:
        """Whole lines of a head; an offer of HTTP/2 is declined by giving it another name."""
        head, end, rest = (self._unfinished + data).partition(b"\r\n\r\n")
        at = head.rfind(b"\r") if not end else -1
        head, self._unfinished = (head, b"") if at < 0 else (head[:at], head[at:])
        return OFFER.sub(b"x-offer:", head) + end + rest

    def _take(self, data: bytes) -> None:
        phase, self.since = self._phase, self.loop.time()
        self._phase_bytes += len(data)
        if phase == "head":
            data = self._without_h2c(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        limits = self._limits
        if phase == self._phase != "body" and self._phase_bytes > limits.header_bytes:
            self._refuse(431, f"the head has more than {limits.header_bytes} bytes")
        elif self._phase == "body" and self._phase_bytes > self._most_body_bytes:
            self._refuse(413, f"the body has more than {limits.body_bytes} bytes")

    @property
    def _most_body_bytes(self) -> int:
        return 2 * self._limits.body_bytes + SPARE_BODY_BYTES

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count headers and trailers."""
        if len(self.headers) >= MOST_HEADERS:
            self._refusal = (431, f"the head has more than {MOST_HEADERS} headers")
            raise ValueError(self._refusal[1])
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Expect a body."""
        self._enter("body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Start the answer, unless it came before the end of the body."""
        self._enter("idle" if self.cycle.response_complete else "answer")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, under uvicorn's keep-alive timer."""
        if self._phase == "answer":
            self._enter("idle")
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Watch a client that reads more slowly than we write."""
        super().pause_writing()
        self._check_reader(None)

    def resume_writing(self) -> None:
        """Stop watching."""
        super().resume_writing()
        if "unread" in self._timers:
            self._timers.pop("unread").cancel()

    def _check_reader(self, num_unread: int | None) -> None:
        """Abort a connection whose client has read nothing since the last check."""
        num_left = self.transport.get_write_buffer_size()
        if num_left == num_unread:
            self.transport.abort()
            return
        again = partial(self._check_reader, num_left)
        self._check_later("unread", self._limits.timeout_s, again)

    def send_400_response(self, msg: str) -> None:
        """Say why a request was not understood."""
        status, reason = self._refusal
        self._refuse(status, reason or msg)

    def _enter(self, phase: Phase) -> None:
        self._phase, self._phase_bytes = phase, 0
        self.since = self._phase_since = self.loop.time()

    def _check_pace(self) -> None:
        """End a connection whose head or body takes too long, or check again later."""
        limits, now = self._limits, self.loop.time()
        until = now + limits.timeout_s
        if self._phase in ("head", "idle"):
            until = self._phase_since + limits.timeout_s
        elif self._phase == "body":
            earned_s = limits.timeout_s + self._phase_bytes / LEAST_BYTES_PER_S
            whole_s = min(limits.body_s, earned_s)
            until = min(self.since + limits.timeout_s, self._phase_since + whole_s)
        if now < until:
            self._check_later("slow", until - now, self._check_pace)
        elif self.transport.get_write_buffer_size():  # of the response before
            self._check_later("slow", limits.timeout_s, self._check_pace)
        elif self._phase == "body" or self._phase_bytes:
            self._refuse(408, f"the request did not arrive in {limits.timeout_s:g} s")
        else:
            self.transport.abort()

    def _check_later(self, name: str, seconds: float, check: Callable[[], None]) -> None:
        self._timers[name] = self.loop.call_later(seconds, check)

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps(Problem(status, reason).body).encode()
            lines = (
                b"content-type: application/json\r\nconnection: close\r\n",
                b"content-length: %d\r\n\r\n" % len(body),
            )
            self.transport.write(b"".join((STATUS_LINE[status], *lines, body)))
        self._check_later("unread", 1.0, self.transport.abort)
        self.transport.close()
