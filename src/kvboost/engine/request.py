"""One request, as the engine sees it: tokens, limits, and how to tell the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from kvboost.core import ReuseMode


@dataclass(frozen=True)
class Request:
    """What to generate from. `started_at` is the caller's clock: when the call came in."""

    tokens: list[int]
    reuse: ReuseMode
    tenant: str
    arguments: dict[str, Any]  # for Transformers' generate()
    started_at: float = field(default_factory=time.perf_counter)
    emit: Callable[[str], None] | None = None  # gets the text as it comes
    loading: Future[None] | None = None  # of what tiers below memory have of the prompt
    cancelled: threading.Event = field(default_factory=threading.Event)

    def streamed(self, emit: Callable[[str], None], cancelled: threading.Event) -> Request:
        """The same request with a listener and a way to stop it."""
        return replace(self, emit=emit, cancelled=cancelled)
