"""One request and its response, from the first token to the last byte, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvboost.engine.results import Completion, Delta
from kvboost.errors import DeadlineExceeded
from kvboost.server.answers import Answers, unless, unless_gone
from kvboost.server.keys import Caller
from kvboost.server.plans import Plan
from kvboost.server.problems import ShuttingDown, internal, problem_of
from kvboost.server.replies import account, headers

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What became of a request, for the telemetry."""

    request_id: str
    tenant: str = ""
    status: int = 0  # 0: nothing was sent yet
    is_stream: bool = False
    error: str = ""
    finish_reason: str = ""
    num_cut_tokens: int = 0  # of answers that did not come to their end
    prompt_tokens: int = 0
    completions: list[Completion] = field(default_factory=list)
    arrived_at: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Since the request arrived."""
        return time.perf_counter() - self.arrived_at


class Running:
    """The requests that are being answered."""

    def __init__(self, engine: KVBoost, deadline_s: float) -> None:
        self._engine = engine
        self.deadline_s = deadline_s
        self._answers: set[Answers] = set()
        self._is_cut = False
        self._others: set[asyncio.Future[None]] = set()  # of other work than answers
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._answers)

    def cut(self) -> None:
        """End all with an error."""
        self._is_cut = True
        for other in self._others:
            if not other.done():
                other.set_result(None)
        for answers in list(self._answers):
            answers.cut(ShuttingDown())

    async def unless_cut(self, work: Awaitable[T]) -> T:
        """Wait for other work than answers, but not beyond the end.

        Raises:
            ShuttingDown: the end has come.
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
    def answering(self, plan: Plan, caller: Caller, outcome: Outcome) -> Iterator[Answers]:
        """Answers that are computed as long as the context lasts, on their caller's account."""
        deadline_s = self.deadline_s - outcome.elapsed_s
        if deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request could start")
        caller.charge_tokens(plan.num_tokens)
        answers = Answers()
        num_used = 0
        try:
            answers.start(self._engine, plan.asks, caller.tenant, deadline_s)
            num_used = outcome.prompt_tokens = plan.prompt_tokens
            self._answers.add(answers)
            yield answers
        finally:
            self._answers.discard(answers)
            answers.cancel()
            num_whole = sum(len(each.token_ids) for each in outcome.completions)
            outcome.num_cut_tokens = max(0, answers.num_tokens - num_whole)
            caller.give_back_tokens(plan.num_tokens - num_used - answers.num_tokens)


class Exchange(Response):
    """The response that computes itself while it is sent.

    Nothing is sent before the first token is there: what fails until then has its own status.
    """

    def __init__(self, plan: Plan, running: Running) -> None:
        super().__init__()
        self._plan = plan
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send; what fails before the first byte is raised."""
        request = Request(scope, receive)
        outcome: Outcome = request.state.outcome
        outcome.is_stream = self._plan.is_stream
        with self._running.answering(self._plan, request.state.caller, outcome) as answers:
            if self._plan.is_stream:
                await self._stream(request, answers, outcome, send)
            else:
                outcome.completions = await unless_gone(request, answers.completions())
                await self._whole(outcome)(scope, receive, send)

    def _whole(self, outcome: Outcome) -> Response:
        plan, answers = self._plan, outcome.completions
        firsts = plan.firsts(answers)
        kept = plan.kept(answers)
        body = plan.reply.whole(kept, account(firsts, answers, plan.document_orders))
        outcome.finish_reason = plan.reply.finish_reason(*kept[0])
        return JSONResponse(body, headers=headers(firsts))

    async def _stream(
        self, request: Request, answers: Answers, outcome: Outcome, send: Send
    ) -> None:
        events = answers.events()
        first = await unless_gone(request, anext(events))
        pieces = self._pieces(first, events, outcome)
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
        outcome: Outcome,
    ) -> AsyncIterator[bytes]:
        """The events of the stream; an error ends it as an event of its own."""
        plan = self._plan
        whole: dict[int, Completion] = {}
        try:
            for chunk in plan.reply.begin(len(plan.asks)):
                yield chunk
            for chunk in self._chunks(*first, whole, outcome):
                yield chunk
            async for index, each in events:
                for chunk in self._chunks(index, each, whole, outcome):
                    yield chunk
        except Exception as error:
            yield self._told(error, outcome)
            return
        answers = [whole[index] for index in sorted(whole)]
        for chunk in plan.reply.end(account(plan.firsts(answers), answers, plan.document_orders)):
            yield chunk

    def _chunks(
        self,
        index: int,
        each: Delta | Completion,
        whole: dict[int, Completion],
        outcome: Outcome,
    ) -> Iterator[bytes]:
        reply = self._plan.reply
        if isinstance(each, Delta):
            choices = reply.piece(index, each)
        else:
            whole[index] = each
            outcome.completions.append(each)
            choices = reply.ending(index, each)
        for choice in choices:
            outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
            yield from reply.events(choice)

    def _told(self, error: Exception, outcome: Outcome) -> bytes:
        problem = problem_of(error)
        if problem is None:
            log.error("request %s failed", outcome.request_id, exc_info=error)
            problem = internal(outcome.request_id)
        outcome.error = problem.code or problem.kind
        return self._plan.reply.fail(problem.body)
