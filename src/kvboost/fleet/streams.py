"""A stream of events with which another replica can go on."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from kvboost.server import replies

DATA = b"data: {"
END = b"\n\n"
NAMES = ("id", "created")  # of an answer, different for each


class Diverged(Exception):
    """The answer of another replica is not the one that was begun."""


class Events:
    """The events that a client has got, so that an answer begun again goes on where it stopped.

    What is computed again says the same, event by event, unless something was left to chance; if
    it does not, the client must not get it.
    """

    def __init__(self) -> None:
        self._got: list[bytes] = []  # digests
        self._names: dict[str, Any] = {}
        self._place = 0  # of the next event of the answer that comes now
        self._rest = b""

    def begin_again(self) -> None:
        """The same answer comes from its start."""
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
