"""The prefetch window: pieces of weights loaded ahead of their use, within a budget.

The order of use is learned: after each piece comes the one that followed it last time. A thread
loads the next piece while the current one is in use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvboost.weights.carrier import Brought, Tensors

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Piece:
    """Weights that come and go together."""

    source: Tensors
    size_bytes: int
    brought: Brought | None = None
    error: Exception | None = None
    num_users: int = 0
    next: Piece | None = field(default=None, repr=False)


class Window:
    """Holds pieces of up to `budget_bytes`, more only if one alone or those in use are larger."""

    def __init__(
        self,
        budget_bytes: int,
        bring: Callable[[Tensors], Brought],
        drop: Callable[[Brought], None],
    ) -> None:
        self.budget_bytes, self._bring, self._drop = budget_bytes, bring, drop
        self.num_uses = self.num_waits = self.brought_bytes = self.peak_bytes = 0
        self._held: dict[Piece, None] = {}  # in the order in which they came
        self._held_bytes = 0
        self._last: Piece | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvboost-weights", daemon=True)
        self._thread.start()

    def enter(self, piece: Piece) -> Brought:
        """Wait until a piece is there; it stays until `leave`.

        Raises:
            Exception: what bringing it raised.
        """
        with self._changed:
            if self._last is not None:
                self._last.next = piece
            self._last, piece.error = piece, None
            piece.num_users += 1
            self.num_uses += 1
            self.num_waits += piece.brought is None
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: piece.brought is not None or piece.error or self._is_closed
                )
                if piece.brought is None:
                    raise piece.error or RuntimeError("the weights are streamed no more")
            except BaseException:
                piece.num_users -= 1
                raise
            return piece.brought

    def leave(self, piece: Piece) -> None:
        """Let a piece go when its room is needed."""
        with self._changed:
            piece.num_users -= 1
            self._changed.notify_all()

    @contextmanager
    def use(self, piece: Piece) -> Iterator[Brought]:
        """`enter` and `leave` around a block."""
        brought = self.enter(piece)
        try:
            yield brought
        finally:
            self.leave(piece)

    def close(self) -> None:
        """End the thread and drop everything; nothing may be entered any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for piece in self._held:
            if piece.brought is not None:
                self._drop(piece.brought)
                piece.brought = None
        self._held.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (work := self._next_work()) is None:
                    self._changed.wait()
                if self._is_closed:
                    return
                assert work is not None
            try:
                work()
            except Exception:  # of `drop`: a device that fails
                log.exception("weights can be streamed no more")
                with self._changed:
                    self._is_closed = True
                    self._changed.notify_all()

    def _next_work(self) -> Callable[[], None] | None:
        """Bring the first missing piece of those that come next, or make room for it."""
        ahead, piece = self._ahead()
        needed_bytes = 0 if piece is None else piece.size_bytes
        if self._held_bytes + needed_bytes > self.budget_bytes:
            idle = (p for p in self._held if not p.num_users and p not in ahead)
            victim = next(idle, None)
            if victim is not None:
                return self._dropping(victim)
            if piece is None or not piece.num_users:
                return None
        return None if piece is None else self._bringing(piece)

    def _ahead(self) -> tuple[set[Piece], Piece | None]:
        """The pieces from the last used one on that are there, and the first that is not."""
        ahead: set[Piece] = set()
        piece = self._last
        while piece is not None and piece not in ahead:
            if piece.brought is None:
                return ahead, piece if piece.error is None else None
            ahead.add(piece)
            piece = piece.next
        return ahead, None

    def _dropping(self, piece: Piece) -> Callable[[], None]:
        brought, piece.brought = piece.brought, None
        del self._held[piece]

        def drop() -> None:
            if brought is not None:
                self._drop(brought)
            with self._changed:
                self._held_bytes -= piece.size_bytes

        return drop

    def _bringing(self, piece: Piece) -> Callable[[], None]:
        self._held[piece] = None
        self._held_bytes += piece.size_bytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self.brought_bytes += piece.size_bytes

        def bring() -> None:
            brought, error = None, None
            try:
                brought = self._bring(piece.source)
            except Exception as raised:
                error = raised
            with self._changed:
                piece.brought, piece.error = brought, error
                if brought is None:
                    del self._held[piece]
                    self._held_bytes -= piece.size_bytes
                self._changed.notify_all()

        return bring
