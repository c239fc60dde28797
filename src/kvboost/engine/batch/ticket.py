"""What a caller holds of a request in the batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from kvboost.engine.results import Completion


class Ticket:
    """A request that waits or runs. Thread-safe."""

    def __init__(self) -> None:
        self.future: Future[Completion] = Future()
        self._cancelled = threading.Event()

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
