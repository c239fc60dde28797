"""What ingress and replicas send each other, and streams that another replica can continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvboost.server import replies

DATA = b"data: {"
END = b"\n\n"
NAMES = ("id", "created")  # of an answer, different for each
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Forwarded:
    """A client's request."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    asked: Mapping[str, Any] = field(default_factory=dict)  # the parsed body of a prompt

    def __reduce__(self) -> tuple[Any, ...]:
        # The replica reads the body itself: what was parsed is for the router beside us.
        return Forwarded, (self.method, self.path, self.query, self.headers, self.body)


@dataclass(frozen=True)
class Head:
    """The beginning of a response; its body follows in pieces."""

    status: int
    headers: Headers


class Diverged(Exception):
    """Another replica's answer differs from the one that was begun."""


class Events:
    """The events that a client has received, so that another replica can continue the stream.

    A repeated answer has the same events, unless it was sampled; if they differ, the client must
    not get them.
    """

    def __init__(self) -> None:
        self._got: list[bytes] = []  # digests
        self._names: dict[str, Any] = {}
        self._place = 0  # of the next event of the answer that comes now
        self._rest = b""

    def begin_again(self) -> None:
        """Another replica starts the same answer."""
        self._place, self._rest = 0, b""

    def new(self, piece: bytes) -> bytes:
        """The events of a piece that the client has not got; the last one waits for its end.

        Raises:
            Diverged: it is another answer.
        """
        *whole, self._rest = (self._rest + piece).split(END)
        return b"".join(map(self._new, whole))

    def _new(self, event: bytes) -> bytes:
        said = json.loads(event.removeprefix(b"data: ")) if event.startswith(DATA) else {}
        names = {name: said.pop(name) for name in NAMES if name in said}
        digest = blake2b(json.dumps(said).encode() if said else event, digest_size=16).digest()
        place, self._place = self._place, self._place + 1
        if place < len(self._got):
            if digest != self._got[place]:
                raise Diverged
            return b""
        self._got.append(digest)
        self._names = self._names or names
        if names != self._names and said:
            return replies.event({**self._names, **said})
        return event + END


def take_outcome(done: asyncio.Future[Any]) -> None:
    """Retrieve the result of a future that nobody awaits, or asyncio would warn."""
    if not done.cancelled():
        done.exception()
