"""One request and its response, from the first token to the last byte, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvboost.engine.results import Completion, Delta
from kvboost.errors import DeadlineExceeded
from kvboost.server.answers import Answers, unless, unless_gone
from kvboost.server.keys import Caller
from kvboost.server.plans import Plan
from kvboost.server.problems import ShuttingDown
from kvboost.server.record import RequestRecord
from kvboost.server.replies import account, headers

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost

T = TypeVar("T")


class Running:
    """The running requests."""

    def __init__(self, engine: KVBoost, deadline_s: float) -> None:
        self._engine = engine
        self.deadline_s = deadline_s
        self._answers: set[Answers] = set()
        self._is_cut = False
        self._others: set[asyncio.Future[None]] = set()  # work other than answers
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._answers)

    def cut(self) -> None:
        """End all requests with an error."""
        self._is_cut = True
        for other in self._others:
            if not other.done():
                other.set_result(None)
        for answers in list(self._answers):
            answers.cut(ShuttingDown())

    async def unless_cut(self, work: Awaitable[T]) -> T:
        """Wait for work other than answers, unless the server shuts down first.

        Raises:
            ShuttingDown: it did.
        """
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_cut:
            end.set_result(None)
        self._others.add(end)
        try:
            return await unless(end, work, ShuttingDown())
        finally:
            self._others.discard(end)

    @contextmanager
    def answering(self, plan: Plan, caller: Caller, record: RequestRecord) -> Iterator[Answers]:
        """Answers that run while the context lasts and count towards the caller's limits."""
        deadline_s = self.deadline_s - record.elapsed_s
        if deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request could start")
        caller.charge_tokens(plan.num_tokens)
        answers = Answers()
        num_used = 0
        try:
            answers.start(self._engine, plan.asks, caller.tenant, deadline_s)
            num_used = record.prompt_tokens = plan.prompt_tokens
            self._answers.add(answers)
            yield answers
        finally:
            self._answers.discard(answers)
            answers.cancel()
            num_whole = sum(len(each.token_ids) for each in record.completions)
            record.num_cut_tokens = max(0, answers.num_tokens - num_whole)
            caller.give_back_tokens(plan.num_tokens - num_used - answers.num_tokens)


class Exchange(Response):
    """A response that is computed while it is sent.

    Nothing is sent before the first token, so that earlier errors have a status of their own.
    """

    def __init__(self, plan: Plan, running: Running) -> None:
        super().__init__()
        self._plan = plan
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send; what fails before the first byte is raised."""
        request = Request(scope, receive)
        record: RequestRecord = request.state.record
        record.is_stream = self._plan.is_stream
        with self._running.answering(self._plan, request.state.caller, record) as answers:
            if self._plan.is_stream:
                await self._stream(request, answers, record, send)
            else:
                record.completions = await unless_gone(request, answers.completions())
                await self._whole(record)(scope, receive, send)

    def _whole(self, record: RequestRecord) -> Response:
        plan, answers = self._plan, record.completions
        record.firsts = firsts = list(plan.firsts(answers))
        kept = plan.kept(answers)
        body = plan.reply.whole(kept, account(firsts, answers, plan.document_orders))
        record.finish_reason = plan.reply.finish_reason(*kept[0])
        return JSONResponse(body, headers=headers(firsts))

    async def _stream(
        self, request: Request, answers: Answers, record: RequestRecord, send: Send
    ) -> None:
        events = answers.events()
        first = await unless_gone(request, anext(events))
        pieces = self._pieces(first, events, record)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                ],
            }
        )
        await unless_gone(request, self._send(pieces, send))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, pieces: AsyncIterator[bytes], send: Send) -> None:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _pieces(
        self,
        first: tuple[int, Delta | Completion],
        events: AsyncIterator[tuple[int, Delta | Completion]],
        record: RequestRecord,
    ) -> AsyncIterator[bytes]:
        """The events of the stream; an error ends it as an event of its own."""
        plan = self._plan
        whole: dict[int, Completion] = {}
        try:
            for chunk in plan.reply.begin(len(plan.asks)):
                yield chunk
            for chunk in self._chunks(*first, whole, record):
                yield chunk
            async for index, each in events:
                for chunk in self._chunks(index, each, whole, record):
                    yield chunk
        except Exception as error:
            yield plan.reply.fail(record.fail(error).body)
            return
        answers = [whole[index] for index in sorted(whole)]
        for chunk in plan.reply.end(account(plan.firsts(answers), answers, plan.document_orders)):
            yield chunk

    def _chunks(
        self,
        index: int,
        each: Delta | Completion,
        whole: dict[int, Completion],
        record: RequestRecord,
    ) -> Iterator[bytes]:
        reply = self._plan.reply
        if isinstance(each, Delta):
            choices = reply.piece(index, each)
        else:
            whole[index] = each
            record.completions.append(each)
            if index % self._plan.num_each == 0:
                record.firsts.append(each)
            choices = reply.ending(index, each)
        for choice in choices:
            record.finish_reason = choice["finish_reason"] or record.finish_reason
            yield from reply.events(choice)
