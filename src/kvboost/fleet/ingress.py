"""The ingress of a fleet: forwards each request to a replica, and to another if that one dies."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.fleet.messages import Diverged, Events, Forwarded, Head, take_outcome
from kvboost.server.answers import ClientGone, disconnected
from kvboost.server.gate import OPEN_PATHS, REQUEST_ID
from kvboost.server.keys import Caller, KeyRing, read_keys
from kvboost.server.options import ServerOptions, is_loopback
from kvboost.server.problems import Problem, internal
from kvboost.server.replies import event

REPLICA = b"x-kvboost-replica"
PROMPTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MOST_TRIES = 3
MOST_WAIT_S = 30.0  # until a replica takes a request: some may be starting
GRACE_S = 5.0  # a replica tells of the deadline itself, as long as it can

log = logging.getLogger(__name__)


class Ingress:
    """What Ray Serve runs at the front; it has no model."""

    def __init__(self, replicas: Any, options: ServerOptions) -> None:
        self._front = Front(replicas.options(stream=True), options)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, for Ray Serve."""
        return self._front


class ReplicaLost(Exception):
    """A replica will not complete its response."""


class Front:
    """The ASGI application; `replicas.answer.remote(request)` sends a request to one of them."""

    def __init__(self, replicas: Any, options: ServerOptions) -> None:
        self._replicas = replicas
        self._options = options
        self._keys = KeyRing(read_keys(options.api_keys) if options.api_keys else ())
        self._is_private = not (self._keys or options.allow_anonymous)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']}: only HTTP is served")
        reply = Reply(send)
        try:
            caller = self._admit(scope)
            # Where requests go tells what others have asked: nothing for everybody.
            reply.tells_replica = caller.is_admin and not self._options.allow_anonymous
            request = _forwarded(scope, await self._body(scope, receive))
            leaving = asyncio.ensure_future(disconnected(receive))
            try:
                await self._pass_on(request, reply, leaving)
            finally:
                leaving.cancel()
        except ClientGone:
            return
        except Problem as problem:
            await reply.fail(problem)
        except Exception:
            request_id = Headers(scope=scope).get(REQUEST_ID, "")
            log.exception("request %s failed", request_id)
            await reply.fail(internal(request_id))

    def _admit(self, scope: Scope) -> Caller:
        """Refuse callers whom a replica would refuse: bodies cost memory, and prompts routing.

        Without keys, as a server that listens at this machine's own address alone: Ray decides
        where its proxies listen, so it is who calls that tells. Names that were made to mean this
        machine are refused by the replica, which sees the client's headers and counts for limits.
        """
        host = (scope.get("client") or ("",))[0]
        if self._is_private and not is_loopback(host):
            reason = f"client {host!r}: without API keys only this machine is served"
            raise Problem(403, reason, code="wrong_client")
        if scope["path"] in OPEN_PATHS:
            return Caller(is_admin=not self._keys)
        return self._keys.caller(Headers(scope=scope).get("authorization", ""))

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        most = self._options.max_body_bytes
        too_large = Problem(413, f"the body is above {most} bytes", code="body_too_large")
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large
        parts: list[bytes] = []
        num_bytes, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > most:
                raise too_large
            has_more = message.get("more_body", False)
        return b"".join(parts)

    async def _pass_on(
        self, request: Forwarded, reply: Reply, leaving: asyncio.Future[None]
    ) -> None:
        """Try replicas until one has answered, or has begun to."""
        ends_at = time.monotonic() + self._options.request_deadline_s + GRACE_S
        num_dead = 0  # replicas that had taken the request
        for _ in range(MOST_TRIES):
            reply.replica = None
            exchange = Exchange(self._replicas.answer.remote(request), leaving, ends_at)
            try:
                await exchange.copy_to(reply)
                return
            except Diverged:
                break
            except ReplicaLost as error:
                log.warning("a replica was lost: %s", error)
                num_dead += reply.replica is not None
                if num_dead == 2 or not reply.can_go_on:  # it may be the request that kills them
                    break
            finally:
                exchange.close()
        if reply.has_begun:
            reason = "the replica that was answering is lost; ask again"
            raise Problem(503, reason, code="replica_lost")
        raise Problem(503, "no replica can answer now", code="no_replica", retry_s=1.0)


class Exchange:
    """One request to one replica."""

    def __init__(self, stream: Any, leaving: asyncio.Future[None], ends_at: float) -> None:
        self._stream = stream
        self._leaving = leaving
        self._ends_at = ends_at
        self._has_ended = False

    async def copy_to(self, reply: Reply) -> None:
        """Pass the response on.

        Raises:
            ReplicaLost: it will not come, or not to its end.
            Diverged: it is not the one that another replica had begun.
            ClientGone: nobody wants it.
            Problem: it did not come in time.
        """
        reply.replica = await self._next(MOST_WAIT_S)
        if reply.replica is None:
            raise ReplicaLost("it said nothing")
        reply.start(await self._next())
        while (piece := await self._next()) is not None:
            await reply.send(piece)
        await reply.end()

    async def _next(self, most_s: float = float("inf")) -> Any:
        """The next item; None at the end."""
        step = asyncio.ensure_future(self._step())
        step.add_done_callback(take_outcome)
        left_s = self._ends_at - time.monotonic()
        try:
            await asyncio.wait(
                {step, self._leaving},
                timeout=max(0.0, min(most_s, left_s)),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if step.done():
                return self._outcome(step)
        finally:
            step.cancel()
        if self._leaving.done():
            raise ClientGone
        if most_s < left_s:
            raise Problem(503, "no replica is free", code="no_replica", retry_s=1.0)
        raise Problem(504, "not done in time", code="deadline_exceeded")

    async def _step(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._has_ended = True
            return None

    def _outcome(self, step: asyncio.Future[Any]) -> Any:
        if step.cancelled():  # not by us: Ray says so of what ran on a replica that ended
            raise ReplicaLost("its work was cancelled")
        error = step.exception()
        if isinstance(error, RayTaskError):  # raised by the application: that would come again
            raise error
        if isinstance(error, RayError | RayServeException):
            raise ReplicaLost(str(error)) from error
        return step.result()

    def close(self) -> None:
        """Cancel the request at the replica, unless it is done."""
        if not self._has_ended:
            self._stream.cancel()


class Reply:
    """The response to the client. Nothing is sent before the first bytes of its body."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.tells_replica = False
        self.replica: str | None = None
        self._head: Head | None = None
        self._events: Events | None = None  # of a stream

    @property
    def can_go_on(self) -> bool:
        """Whether another replica can continue it."""
        return not self.has_begun or self._events is not None

    def start(self, head: Head | None) -> None:
        """A response begins; the client gets the head of the first one.

        Raises:
            ReplicaLost: it has none, or cannot be what is missing of the first.
        """
        is_stream = head is not None and _is_stream(head)
        if head is None or (self.has_begun and not is_stream):
            raise ReplicaLost("it does not answer")
        if not self.has_begun:
            self._head, self._events = head, Events() if is_stream else None
        elif self._events is not None:
            self._events.begin_again()

    async def send(self, piece: bytes) -> None:
        """Send a piece of the body, or what is new of it."""
        new = piece if self._events is None else self._events.new(piece)
        if new:
            await self._begin()
            await self._send({"type": "http.response.body", "body": new, "more_body": True})

    async def end(self) -> None:
        """Send the end."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, problem: Problem) -> None:
        """Send an error, as far as that is still possible.

        Raises:
            Problem: the response is broken off; its reader sees that it is not whole.
        """
        if not self.has_begun:
            await problem.response({"type": "http"}, _nothing, self._send)
        elif self._events is not None:
            told = event(problem.body, "error")
            await self._send({"type": "http.response.body", "body": told, "more_body": False})
        else:
            raise problem

    async def _begin(self) -> None:
        if self.has_begun:
            return
        assert self._head is not None and self.replica is not None
        self.has_begun = True
        # Ray's proxy adds the request's id, which it gave the request itself.
        kept = [pair for pair in self._head.headers if pair[0].lower() != REQUEST_ID.encode()]
        shown = [(REPLICA, self.replica.encode())] if self.tells_replica else []
        status, headers = self._head.status, [*kept, *shown]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _is_stream(head: Head) -> bool:
    return dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream")


def _forwarded(scope: Scope, body: bytes) -> Forwarded:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    asked = _parsed(body) if scope["method"] == "POST" and path in PROMPTS else {}
    return Forwarded(
        scope["method"],
        path,
        scope.get("query_string", b""),
        tuple((name, value) for name, value in scope["headers"]),
        body,
        asked,
    )


def _parsed(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; of anything else the replica will tell what is wrong."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) else {}


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def _live(receive: Receive, send: Send) -> None:
    """There is nothing to start or to end, but Ray Serve asks."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})
