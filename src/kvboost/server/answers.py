"""The answers of one HTTP request while the engine computes them: from its thread to asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from kvboost.core import ReuseMode, Sampling
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.results import Completion, Delta

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """One output to generate."""

    tokens: Sequence[int]
    sampling: Sampling
    reuse: ReuseMode | None
    adapter: str | None = None
    document_order: tuple[int, ...] = ()  # of arranged documents


class ClientGone(Exception):
    """The client has disconnected."""


class Answers:
    """Several outputs generated at once; one reader waits for the events of all.

    Pieces that a slow reader has not fetched are joined, so that no more than the answers' own text
    waits for it; `max_new_tokens` bounds that. The engine never waits for a reader.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tickets: list[Ticket] = []
        self._pending: list[tuple[int, Delta | Future[Completion]]] = []
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self.num_tokens = 0  # received from the engine, fetched or not

    def start(self, engine: KVBoost, asks: Sequence[Ask], tenant: str, deadline_s: float) -> None:
        """Submit all outputs to the engine, or none.

        Raises:
            KVBoostError: the engine does not take one of them.
        """
        for index, ask in enumerate(asks):
            try:
                ticket = engine.submit(
                    ask.tokens,
                    ask.sampling,
                    reuse=ask.reuse,
                    tenant=tenant,
                    adapter=ask.adapter,
                    deadline_s=deadline_s,
                    listener=partial(self._post, index),
                )
            except BaseException:
                self.cancel()
                raise
            self._tickets.append(ticket)
            ticket.future.add_done_callback(partial(self._post, index))

    def cancel(self) -> None:
        """Cancel all answers."""
        for ticket in self._tickets:
            ticket.cancel()

    def cut(self, error: BaseException) -> None:
        """Cancel all; the reader gets the error."""
        self._error = error
        self._wake.set()
        self.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Delta | Completion]]:
        """Deltas and, at the end of each answer, its completion; each with the answer's number.

        Raises:
            BaseException: what ended an answer, or what `cut` was given.
        """
        num_left = len(self._tickets)
        while num_left:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            pending, self._pending = self._pending, []
            for index, event in _joined(pending):
                if isinstance(event, Future):
                    num_left -= 1
                    yield index, event.result()
                else:
                    yield index, event

    async def completions(self) -> list[Completion]:
        """All answers, once they are complete."""
        ends = {i: end async for i, end in self.events() if isinstance(end, Completion)}
        return [ends[index] for index in sorted(ends)]

    def _post(self, index: int, event: Delta | Future[Completion]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._arrive, index, event)

    def _arrive(self, index: int, event: Delta | Future[Completion]) -> None:
        if isinstance(event, Delta):
            self.num_tokens += len(event.token_ids)
        self._pending.append((index, event))
        self._wake.set()


def _joined(
    pending: Sequence[tuple[int, Delta | Future[Completion]]],
) -> list[tuple[int, Delta | Future[Completion]]]:
    """The same with the pieces of each answer joined to one."""
    pieces: dict[int, list[Delta]] = {}
    ends: list[tuple[int, Delta | Future[Completion]]] = []
    for index, event in pending:
        if isinstance(event, Delta):
            pieces.setdefault(index, []).append(event)
        else:
            ends.append((index, event))
    joined = [(index, _join(parts)) for index, parts in pieces.items()]
    return [*joined, *ends]


def _join(parts: Sequence[Delta]) -> Delta:
    return Delta(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(each for part in parts for each in part.logprobs),
    )


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for work, unless the client disconnects first.

    Raises:
        ClientGone: it did.
    """
    return await unless(disconnected(request.receive), work, ClientGone())


async def unless(event: Awaitable[object], work: Awaitable[T], error: Exception) -> T:
    """Wait for work, unless an event comes first: then raise `error`."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        has_failed = task.done() and task.exception() is not None
        if other.done() and not has_failed:  # bytes sent to nobody are no success
            raise error
        return task.result()
    finally:
        other.cancel()
        task.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
