"""The handle that a caller has of its request in the batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from kvboost.engine.results import Completion


class Ticket:
    """A waiting or running request. Thread-safe."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self.future: Future[Completion] = _Answer(self._cancelled)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop the request soon; `result` then raises CancelledError, unless it was done before."""
        self._cancelled.set()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the output; raises the error of a failed request.

        Args:
            timeout_s: Seconds to wait at most; default: no limit.
        """
        return self.future.result(timeout_s)


class _Answer(Future[Completion]):
    """A future that only the batch ends: cancelling it, as asyncio does, just asks the batch to."""

    def __init__(self, cancelled: threading.Event) -> None:
        super().__init__()
        self._is_unwanted = cancelled
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Stop soon, not at once: false."""
        self._is_unwanted.set()
        return super().cancel()
