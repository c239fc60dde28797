"""The one thread that owns the model.

Requests from any thread queue for it. One thread also means one memory arena and one team of
compute threads, where torch would make a team of its own for every thread that calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Later = Callable[[], None]

log = logging.getLogger(__name__)


class Worker:
    """Runs work in the order it comes."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvboost")

    def call(self, work: Callable[[], T]) -> T:
        """Do `work` on the thread and wait for it."""
        return self._executor.submit(work).result()

    def submit(self, work: Callable[[], tuple[T, Later]]) -> Future[T]:
        """Start work that returns a result and what is to be done once the result is delivered."""
        reply: Future[T] = Future()
        self._executor.submit(self._deliver, work, reply)
        return reply

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._executor.shutdown()

    @staticmethod
    def _deliver(work: Callable[[], tuple[T, Later]], reply: Future[T]) -> None:
        try:
            result, later = work()
        except BaseException as error:
            reply.set_exception(error)
            return
        reply.set_result(result)
        try:
            later()
        except Exception:
            log.exception("work after an answer failed; the answer is not affected")
