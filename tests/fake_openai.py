"""A server that answers by rule, rightly or with a chosen fault: load tests are tested on it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from servers import free_port

MAX_BATCH, MAX_QUEUE = 2, 2
DEADLINE_S = 0.3
LONG_TOKENS = 1000
BODY_BYTES = 2**20
NUM_ALONE = 16  # requests that are answered rightly, whatever the fault


class FakeServer:
    """`fault`: what it does wrong, now and then."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault
        self._num_running = self._num_asked = 0
        self._last = ""
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: JSONResponse({})),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "fake"}]})),
                Route("/v1/stats", self._stats),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/warm", self._answer, methods=["POST"]),
            ]
        )

    def _stats(self, request: Request) -> Response:
        running = self._num_running + (self._fault == "leaves a slot behind")
        batch = {"num_running": running, "num_waiting": 0}
        batch |= {"max_batch_size": MAX_BATCH, "max_queue_size": MAX_QUEUE}
        return JSONResponse({"batch": batch})

    async def _answer(self, request: Request) -> Response:
        content = await request.body()
        if len(content) > BODY_BYTES:
            return error(413, "too large")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            return error(400, "not JSON")
        if not isinstance(body, dict) or not well_formed(body):
            return error(400, "invalid")
        if self._num_running >= MAX_BATCH + MAX_QUEUE:
            return error(503, "the queue is full", {"Retry-After": "1"})
        self._num_running += 1
        try:
            return await self._reply(body)
        finally:
            self._num_running -= 1

    async def _reply(self, body: dict[str, Any]) -> Response:
        self._num_asked += 1
        text, self._last = answer_to(body), self._last or answer_to(body)
        is_due = self._num_asked > NUM_ALONE and self._num_asked % 5 == 0
        if is_due and self._fault == "mixes answers up":
            text = self._last
        if is_due and self._fault == "fails":
            raise RuntimeError("on purpose")
        if body.get("max_tokens", 0) > LONG_TOKENS:
            await asyncio.sleep(DEADLINE_S)
            return error(504, "too late")
        await asyncio.sleep(0.002)
        if body.get("stream"):
            is_cut = is_due and self._fault == "breaks off"
            return StreamingResponse(pieces(text, is_cut=is_cut), media_type="text/event-stream")
        return JSONResponse({"choices": [{"text": text, "message": {"content": text}}]})


def well_formed(body: dict[str, Any]) -> bool:
    messages = body.get("messages", body.get("prompt"))
    limit, heat = body.get("max_tokens", 1), body.get("temperature", 0)
    roles = [each.get("role") for each in messages] if isinstance(messages, list) else ["user"]
    is_text = isinstance(messages, str) if "prompt" in body else isinstance(messages, list)
    ranges = isinstance(limit, int) and limit > 0 and heat >= 0 and body.get("top_p", 1) <= 1
    return bool(messages) and is_text and set(roles) <= {"user", "system"} and ranges


def answer_to(body: dict[str, Any]) -> str:
    asked = json.dumps(body.get("messages", body.get("prompt")))
    return "code " + hashlib.sha256(asked.encode()).hexdigest()[:12]


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


async def pieces(text: str, *, is_cut: bool) -> AsyncIterator[bytes]:
    for letter in text:
        choice = {"text": letter, "delta": {"content": letter}}
        yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    if not is_cut:
        yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Run an application in a thread; the URL."""
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
