"""For tests of threads and coroutines: waiting, working at once, and a loop to run in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

PATIENCE_S = 60.0  # for what must happen at some time


def wait_until(is_so: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < give_up_at, "it did not happen"
        time.sleep(0.005)


def at_once(work: Callable[..., Any], arguments: Iterable[Any]) -> list[Any]:
    """Call with each of the arguments, on a thread of its own; what the calls return."""
    given = list(arguments)
    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(work, given))


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of a coroutine, which must come to its end."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), PATIENCE_S))

    return run
