"""The one thread that owns the model.

Requests from any thread queue for it. One thread also means one memory arena and one team of
compute threads, where torch would make a team of its own for every thread that calls it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvboost.errors import KVBoostError

T = TypeVar("T")
Later = Callable[[], None]

log = logging.getLogger(__name__)


class Worker:
    """Runs work in the order it comes."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvboost")
        self._thread = self._executor.submit(threading.get_ident).result()

    def call(self, work: Callable[[], T]) -> T:
        """Do `work` on the thread and wait for it."""
        self._refuse_itself()
        return self._executor.submit(work).result()

    def submit(self, work: Callable[[], tuple[T, Later]]) -> Future[T]:
        """Start work that returns a result and what is to be done once the result is delivered."""
        self._refuse_itself()
        reply: Future[T] = Future()
        self._executor.submit(self._deliver, work, reply)
        return reply

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._executor.shutdown()

    def _refuse_itself(self) -> None:
        if threading.get_ident() == self._thread:
            raise KVBoostError("called from inside a request, which would wait for itself")

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
