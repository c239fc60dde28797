"""What a caller holds of a request in the batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from kvboost.engine.results import Completion


class Ticket:
    """A request that waits or runs. Thread-safe."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self.future: Future[Completion] = _Answer(self._cancelled)

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants the answer any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop soon; the future ends with CancelledError unless the answer was there already."""
        self._cancelled.set()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the answer, or for the error that ended it."""
        return self.future.result(timeout_s)


class _Answer(Future[Completion]):
    """Ended by the batch alone: who cancels it, asyncio for one, asks the batch to do so."""

    def __init__(self, cancelled: threading.Event) -> None:
        super().__init__()
        self._is_unwanted = cancelled
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Stop soon, not at once: false."""
        self._is_unwanted.set()
        return super().cancel()
