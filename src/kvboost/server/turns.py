"""Work on a request before it is in the engine's queue: tenants take turns on threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvboost.errors import QueueFull

MOST_WAITING = 128  # of one tenant: their bodies are in memory


class Turns:
    """A few threads for the work of all tenants. Used on the event loop."""

    def __init__(self, name: str, num_threads: int = 1, most_waiting: int = MOST_WAITING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, f"kvboost-{name}")
        self._name, self._num_free, self._most_waiting = name, num_threads, most_waiting
        # By tenant; the first one is next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, tenant: str, work: Callable[[], Any]) -> Any:
        """Run work on a thread when it is the tenant's turn.

        Raises:
            QueueFull: too many of the tenant's requests wait already.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)
        doing.add_done_callback(self._pass_on)
        return await doing

    async def _wait(self, tenant: str) -> None:
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._most_waiting:
            num = self._most_waiting
            raise QueueFull(f"{num} of your requests are already waiting ({self._name})")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was its turn
                self._pass_on()
            elif turn in waiting:
                waiting.remove(turn)
            raise

    def _pass_on(self, done: object = None) -> None:
        """Give a free thread to the next tenant."""
        while self._waiting:
            tenant, waiting = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            turn = waiting.popleft() if waiting else None
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
