"""The endpoints of the server, and the application around them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from kvboost import __version__
from kvboost.core import Grammar
from kvboost.errors import KVBoostError
from kvboost.server.answers import unless_gone
from kvboost.server.bodies import (
    CacheBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    WarmBody,
)
from kvboost.server.documented import DocumentedApp, responses
from kvboost.server.exchange import Exchange, Running
from kvboost.server.gate import DOCS, REQUEST_ID, Gate
from kvboost.server.keys import KeyRing
from kvboost.server.options import ServerOptions
from kvboost.server.page import page
from kvboost.server.plans import Plan, Planner, Served
from kvboost.server.problems import Problem, ShuttingDown, invalid, refused
from kvboost.server.record import RequestRecord
from kvboost.server.responses import ResponsesBody
from kvboost.server.telemetry import Telemetry
from kvboost.server.turns import Turns

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost
    from kvboost.server.grammar import Grammars

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/warm": WarmBody,
    "/v1/cache/pin": CacheBody,
    "/v1/cache/delete": CacheBody,
}
ABSENT = {"/v1/embeddings": "this server generates text; it has no embeddings"}
Routes: TypeAlias = tuple[tuple[str, str, Callable[..., Any]], ...]
KINDS = {"/": HTMLResponse, "/metrics": PlainTextResponse}
MOST_LISTED = 10_000  # chunks
MOST_WARMS = 8  # calls of a tenant that wait


class Endpoints:
    """The handler of each path."""

    def __init__(
        self,
        engine: KVBoost,
        planner: Planner,
        running: Running,
        telemetry: Telemetry,
        model: Served,
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._running = running
        self._telemetry = telemetry
        self._model = model
        self._created_at = int(time.time())
        # One thread: neither tokenizers nor chat templates are safe to use from several.
        self._preparing = Turns("prepare")
        # A hostile schema may take seconds.
        self._compiling = Turns("compile")
        # Warming takes as long as the texts are long; lists and deletions do not wait for it.
        self._warming = Turns("warm", num_threads=2, most_waiting=MOST_WARMS)
        self._administering = Turns("administer", num_threads=2)

    def add_to(self, app: FastAPI) -> None:
        """Add the route of each path."""
        everybodys: Routes = (
            ("/", "GET", self.home),
            ("/health", "GET", self.health),
            ("/ready", "GET", self.ready),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.one_model),
            ("/v1/completions", "POST", self.completion),
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/responses", "POST", self.respond),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
        )
        administrators: Routes = (
            ("/metrics", "GET", self.metrics),
            ("/v1/stats", "GET", self.stats),
            ("/v1/warm", "POST", self.warm),
            ("/v1/cache", "GET", self.cached),
            ("/v1/cache/pin", "POST", self.pin),
            ("/v1/cache/delete", "POST", self.delete),
        )
        for routes, needs in ((everybodys, []), (administrators, [Depends(_need_admin)])):
            for path, method, endpoint in routes:
                app.add_api_route(
                    path,
                    endpoint,
                    methods=[method],
                    dependencies=needs,
                    responses=responses(path),
                    response_model=None,
                    response_class=KINDS.get(path, JSONResponse),
                )

    async def home(self, request: Request) -> Response:
        """A page for browsers: model, status and links."""
        shown = None if request.app.state.has_keys else self._model.name
        api = request.app.docs_url or request.app.openapi_url
        return page(shown, __version__, api, is_ready=not self._running.is_draining)

    async def health(self) -> Response:
        """Whether the process is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Whether the server accepts requests and computes them."""
        if self._running.is_draining:
            raise ShuttingDown
        busy_s = self._engine.busy_s
        if busy_s > self._running.deadline_s:  # whatever is asked now would fail as well
            raise Problem(503, f"the engine has been in one step for {busy_s:.0f} s", code="stuck")
        return JSONResponse({"status": "ready"})

    async def metrics(self) -> Response:
        """Counters and histograms for Prometheus."""
        body, content_type = self._telemetry.render()
        return Response(body, headers={"content-type": content_type})

    async def models(self) -> Response:
        """The model and its adapters."""
        cards = [self._card(name) for name in (self._model.name, *self._model.adapters)]
        return JSONResponse({"object": "list", "data": cards})

    async def one_model(self, name: str) -> Response:
        """One of them, by name."""
        return JSONResponse(self._card(self._model.adapter(name) or self._model.name))

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """Complete prompts."""
        return await self._answer(
            request, partial(self._planner.completion, body, request.state.caller.tenant)
        )

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat."""
        return await self._answer_chat(request, body, self._planner.chat)

    async def respond(self, body: ResponsesBody, request: Request) -> Response:
        """OpenAI's Responses API, without stored state."""
        make_plan = partial(self._planner.response, body)
        return await self._answer_chat(request, body.chat, make_plan)

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Tokenize a prompt or a chat."""
        return JSONResponse(await self._prepared(request, partial(self._planner.tokenized, body)))

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Turn tokens back into text."""
        return JSONResponse(await self._prepared(request, partial(self._planner.detokenized, body)))

    async def stats(self) -> Response:
        """The current state of batch and cache."""
        return JSONResponse(
            {
                "model": self._model.name,
                "version": __version__,
                "requests": {**self._telemetry.summary(), "num_now": len(self._running)},
                "batch": self._engine.batch_stats(),
                "engine": self._engine.cache_stats(),
            }
        )

    async def warm(self, body: WarmBody, request: Request) -> Response:
        """Prefill and store texts before requests need them."""
        content = await self._queued(request, self._preparing, partial(self._planner.warmed, body))
        warming = partial(
            self._engine.warm,
            content,
            anywhere=body.anywhere,
            preface=body.preface,
            pin=body.pin,
            ttl_s=body.ttl_s,
            tenant=_tenant(body.tenant, request),
            adapter=self._model.adapter(body.model),
        )
        result = await self._running.unless_cut(self._queued(request, self._warming, warming))
        return JSONResponse(dataclasses.asdict(result))

    async def cached(
        self,
        request: Request,
        tenant: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
    ) -> Response:
        """The chunks stored for a tenant."""
        listing = partial(self._engine.contents.chunks, _tenant(tenant, request), limit)
        return JSONResponse({"object": "list", "data": await self._administered(request, listing)})

    async def pin(self, body: CacheBody, request: Request) -> Response:
        """Exempt the stored chunks of a text from eviction."""
        if body.everything:
            raise refused("everything: only for deletion", "everything")
        tokens = await self._queued(request, self._preparing, partial(self._planner.stored, body))
        tenant = _tenant(body.tenant, request)
        pinning = partial(self._engine.contents.pin, tokens, ttl_s=body.ttl_s, tenant=tenant)
        num = await self._administered(request, pinning)
        return JSONResponse({"num_pinned": num})

    async def delete(self, body: CacheBody, request: Request) -> Response:
        """Delete the stored chunks of a text, or all of a tenant's, pinned ones included."""
        if body.ttl_s is not None:
            raise refused("ttl_s: only for pins", "ttl_s")
        tokens = None
        if not body.everything:
            stored = partial(self._planner.stored, body)
            tokens = await self._queued(request, self._preparing, stored)
        tenant = _tenant(body.tenant, request)
        deleting = partial(self._engine.contents.delete, tokens, tenant=tenant)
        deletion = await self._administered(request, deleting)
        return JSONResponse(dataclasses.asdict(deletion))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_at,
            "owned_by": "kvboost",
            "max_model_len": self._model.context_tokens,
            "parent": None if name == self._model.name else self._model.name,
        }

    async def _answer_chat(
        self,
        request: Request,
        body: ChatBody,
        make_plan: Callable[[ChatBody, Sequence[Grammar | None], str], Plan],
    ) -> Response:
        grammars: list[Grammar | None] = [None] * (body.n or 1)
        if body.has_form:  # others do not wait behind schemas
            compiling = partial(self._planner.grammars, body)
            waiting = self._queued(request, self._compiling, compiling)
            grammars = await unless_gone(request, waiting)
        return await self._answer(
            request, partial(make_plan, body, grammars, request.state.caller.tenant)
        )

    async def _answer(self, request: Request, make_plan: Callable[[], Plan]) -> Response:
        return Exchange(await self._prepared(request, make_plan), self._running)

    async def _prepared(self, request: Request, work: Callable[[], Any]) -> Any:
        return await unless_gone(request, self._queued(request, self._preparing, work))

    async def _queued(self, request: Request, turns: Turns, work: Callable[[], Any]) -> Any:
        """Run work for a request before it enters the engine's queue."""
        return await turns.run(request.state.caller.tenant, work)

    async def _administered(self, request: Request, work: Callable[[], Any]) -> Any:
        return await self._queued(request, self._administering, work)


def make_app(
    engine: KVBoost,
    options: ServerOptions,
    telemetry: Telemetry,
    grammars: Grammars,
    *,
    model: Served,
    keys: KeyRing | None = None,
) -> FastAPI:
    """The whole application; `app.state.running` is what a shutdown drains."""
    app = DocumentedApp(
        title="KVBoost",
        version=__version__,
        docs_url=DOCS if options.docs else None,
        swagger_ui_oauth2_redirect_url=None,
        redoc_url=None,
    )
    keys = KeyRing() if keys is None else keys
    app.state.has_keys = bool(keys)
    running = app.state.running = Running(engine, options.request_deadline_s)
    planner = Planner(engine.tokenizer, options, model, grammars, engine.contents.arrangement)
    Endpoints(engine, planner, running, telemetry, model).add_to(app)
    app.add_middleware(
        Gate,
        keys=keys,
        options=options,
        running=running,
        telemetry=telemetry,
        json_paths=BODIES.keys(),
    )
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send some of their own: X-Stainless-...
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_exception_handler(HTTPException, _tell)
    app.add_exception_handler(KVBoostError, _tell)
    app.add_exception_handler(RequestValidationError, _tell)
    return app


async def _tell(request: Request, error: Exception) -> Response:
    """An error as OpenAI's error body."""
    if isinstance(error, RequestValidationError):
        error = invalid(error.errors(), BODIES.get(request.url.path))
    elif isinstance(error, HTTPException) and not isinstance(error, Problem):
        error = _plain_problem(error, request.url.path)
    record: RequestRecord = request.state.record
    return record.fail(error).response


def _plain_problem(error: HTTPException, path: str) -> Problem:
    names = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
    code, reason = names.get(error.status_code), ABSENT.get(path, str(error.detail))
    return Problem(error.status_code, reason, code=code, headers=error.headers)


async def _need_admin(request: Request) -> None:
    if not request.state.caller.is_admin:
        raise Problem(403, "this path needs an admin API key", code="not_admin")


def _tenant(named: str | None, request: Request) -> str:
    """The tenant an administrator names, or their own."""
    tenant: str = request.state.caller.tenant
    return tenant if named is None else named
