"""Replies of a Redis server with an end: whatever it sends, a read is bounded in bytes and time."""

from __future__ import annotations

import time
from typing import Any

from redis.connection import DefaultParser

LEAST_BYTES_PER_S = 1 << 20  # below, a reply is given up


def bounded_parser(most_bytes: int, timeout_s: float) -> type:
    """A parser that gives up replies that are too large or too slow."""
    most_s = timeout_s + most_bytes / LEAST_BYTES_PER_S

    class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]
        def on_connect(self, connection: Any, **arguments: Any) -> None:
            super().on_connect(connection, **arguments)
            sock = connection._sock  # noqa: SLF001  (as the parser does)
            self._sock: Any = _Metered(sock, most_bytes, most_s)

        def read_response(self, *arguments: Any, **options: Any) -> Any:
            if isinstance(self._sock, _Metered):
                self._sock.begin()
            return super().read_response(*arguments, **options)

    return BoundedParser


class _Metered:
    """A socket whose reads add up."""

    def __init__(self, sock: Any, most_bytes: int, most_s: float) -> None:
        self._sock, self._most_bytes, self._most_s = sock, most_bytes, most_s
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self._num_bytes, self._until = 0, time.monotonic() + self._most_s

    def recv_into(self, buffer: Any) -> int:
        """Read, unless that was too much already."""
        if self._num_bytes > self._most_bytes or time.monotonic() > self._until:
            raise OverflowError(f"a reply of more than {self._num_bytes} bytes does not end")
        num_bytes: int = self._sock.recv_into(buffer)
        self._num_bytes += num_bytes
        return num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
