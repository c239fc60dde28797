"""One engine in a process of its own, with the same application as `kvboost serve` around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import serve
from starlette.types import ASGIApp, Message

from kvboost.config import Options
from kvboost.fleet.messages import Forwarded, Head, take_outcome
from kvboost.routing.held import Held
from kvboost.server.app import make_app
from kvboost.server.logs import configure
from kvboost.server.options import ServerOptions
from kvboost.server.serve import load
from kvboost.server.telemetry import Telemetry

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost


class EngineReplica:
    """A replica, as Ray Serve runs it."""

    _engine: KVBoost | None = None

    def __init__(self, options: ServerOptions, engine_options: Options) -> None:
        configure(options.log_format)
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        engine_options = with_own_folder(engine_options, context.rank.local_rank)
        engine, model, keys, grammars = load(options, engine_options)
        self._engine = engine
        telemetry = Telemetry(engine, model=model.name)
        self._app = make_app(engine, options, telemetry, grammars, model=model, keys=keys)
        self._held = Held(partial(_text, engine.tokenizer))
        engine.watch(self._held)

    async def answer(self, request: Forwarded) -> AsyncIterator[str | Head | bytes]:
        """The replica's name as soon as it has the request, then the response."""
        yield self._name
        async for each in respond(self._app, request):
            yield each

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the engine holds, for the routers; Ray Serve asks for it now and then."""
        report = await asyncio.to_thread(self._held.report)
        return report.to_wire()

    def __del__(self) -> None:
        # Ray Serve calls this once no request runs any more: what was computed is to be stored.
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def with_own_folder(options: Options, rank: int) -> Options:
    """The options with a folder for this replica: only one process can use a folder.

    `rank` is the replica's number on its machine, which the one that replaces it gets again.
    """
    if options.disk_cache_dir is None:
        return options
    return replace(options, disk_cache_dir=str(Path(options.disk_cache_dir) / str(rank)))


async def respond(app: ASGIApp, request: Forwarded) -> AsyncIterator[Head | bytes]:
    """Run an ASGI application on a request; closing the generator means that the client left."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue(1)  # the application waits for the client
    is_gone = asyncio.Event()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message | None) -> None:
        if not is_gone.is_set():
            await sent.put(message)

    async def run() -> None:
        try:
            await app(_scope(request), receive, send)
        finally:
            await send(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], tuple(message.get("headers", ())))
            elif message.get("body"):
                yield bytes(message["body"])
        running.result()
    finally:
        # Not cancelled: the application is to see the client leave, as it does behind a socket.
        is_gone.set()
        if sent.full():
            sent.get_nowait()  # for which it may be waiting
        running.add_done_callback(take_outcome)


def _scope(request: Forwarded) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
    }


def _text(tokenizer: Any, tokens: bytes) -> bytes:
    text: str = tokenizer.decode(np.frombuffer(tokens, "<u4").tolist())
    return text.encode()
