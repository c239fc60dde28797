"""Text that arrives while the engine generates it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from kvboost.engine.results import GenerationResult

Event = str | GenerationResult | BaseException
Start = Callable[[Callable[[Event], None], threading.Event], None]
"""Called with (put, cancelled): puts text, and at the end the result or an error."""


class TextStream(Iterator[str]):
    """An iterator over pieces of text; afterwards `result` is the whole `GenerationResult`.

    Generation runs ahead of the reader, and stops soon after the stream is closed or deleted. An
    error of the request is raised in place of the next piece. `result` is None until the last
    piece was read. As a context manager it closes itself.

    Example:
        >>> with engine.stream("The capital of France is", max_new_tokens=2) as stream:
        ...     text = "".join(stream)
        >>> text, stream.result.prompt_tokens
        (' Paris.', 5)
    """

    def __init__(self, start: Start) -> None:
        self.result: GenerationResult | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._is_over = False
        start(self._events.put, self._cancelled)

    def __next__(self) -> str:
        if self._is_over:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, str):
            return event
        self._is_over = True
        if isinstance(event, BaseException):
            raise event
        self.result = event
        raise StopIteration

    def close(self) -> None:
        """Stop generating; later pieces are dropped and `result` stays None.

        Example:
            >>> stream = engine.stream("Once upon a time", max_new_tokens=1000)
            >>> piece = next(stream)
            >>> stream.close()
            >>> list(stream), stream.result
            ([], None)
        """
        self._cancelled.set()
        self._is_over = True

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._cancelled.set()


async def text_of(start: Start) -> AsyncIterator[str]:
    """The same for asyncio: no thread waits, and leaving the loop stops the generation."""
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def put(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        await loop.run_in_executor(None, start, put, cancelled)  # it may wait for a place
        while isinstance(event := await events.get(), str):
            yield event
        if isinstance(event, BaseException):
            raise event
    finally:
        cancelled.set()
