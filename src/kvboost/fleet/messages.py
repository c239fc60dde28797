"""What the ingress sends to a replica, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
