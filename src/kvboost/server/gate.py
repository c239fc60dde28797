"""Middleware of every request: its id, its caller, its limits and its outcome."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server.answers import ClientGone
from kvboost.server.exchange import Outcome, Running
from kvboost.server.keys import Caller, KeyRing
from kvboost.server.options import ServerOptions, is_loopback
from kvboost.server.problems import Problem, ShuttingDown, internal, problem_of
from kvboost.server.telemetry import RequestRecord, Telemetry

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PORT = re.compile(r":[0-9]*$")
JSON_TYPE = re.compile(r"application/(\w+\+)?json\s*(;|$)", re.IGNORECASE)
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
DOCS = "/docs"
OPEN_PATHS = ("/", "/health", "/ready", "/openapi.json", DOCS)  # need no key
UNOBSERVED = ("/health", "/ready", "/metrics")
CLIENT_GONE = 499  # as other servers log it; nobody receives it

log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware around all endpoints. Bodies are not read before a caller is known."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        options: ServerOptions,
        running: Running,
        telemetry: Telemetry,
        json_paths: Collection[str],
    ) -> None:
        """`json_paths`: those that take a body."""
        self._app = app
        self._json_paths = json_paths
        self._keys = keys
        self._options = options
        self._running = running
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in and observe how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.time()
        given = Headers(scope=scope).get(REQUEST_ID, "")
        outcome = Outcome(given if SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}")
        scope.setdefault("state", {})["outcome"] = outcome

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = outcome.request_id
            await send(message)

        try:
            await self._pass(scope, receive, send_with_id, outcome)
        finally:
            if scope["path"] not in UNOBSERVED:
                total_s = outcome.elapsed_s
                self._telemetry.observe(self._record(scope, outcome, started_at, total_s))

    async def _pass(self, scope: Scope, receive: Receive, send: Send, outcome: Outcome) -> None:
        try:
            self._admit(scope, outcome)
            await self._app(scope, self._bounded(receive), send)
        except ClientGone:
            outcome.status, outcome.finish_reason = CLIENT_GONE, "cancelled"
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                log.exception("request %s failed", outcome.request_id)
                problem = internal(outcome.request_id)
            outcome.error = problem.code or problem.kind
            if outcome.status:  # too late to tell
                raise
            await problem.response(scope, receive, send)

    def _admit(self, scope: Scope, outcome: Outcome) -> None:
        headers = Headers(scope=scope)
        host = PORT.sub("", headers.get("host", ""))
        anybody = not self._keys and not self._options.allow_anonymous
        if anybody and not is_loopback(host):
            # DNS rebinding: a web page whose name resolves to this machine calls under that name.
            reason = f"host {host!r}: without API keys, only local clients are served"
            raise Problem(403, reason, code="wrong_host")
        if anybody:
            self._check_local(headers)
        if scope["path"] in OPEN_PATHS:
            return
        takes_json = scope["method"] == "POST" and scope["path"] in self._json_paths
        if takes_json and not JSON_TYPE.match(headers.get("content-type", "")):
            raise Problem(415, "expected content-type: application/json", code="wrong_type")
        caller = self._keys.caller(headers.get("authorization", ""))
        if not self._keys and self._options.allow_anonymous:
            # Or anyone on the network could read the beginnings of all prompts, and delete them.
            caller = Caller(is_admin=False)
        scope["state"]["caller"] = caller
        outcome.tenant = caller.tenant
        if self._running.is_draining:
            raise ShuttingDown
        caller.charge_request()
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._options.max_body_bytes:
            raise self._too_large()

    def _check_local(self, headers: Headers) -> None:
        """Refuse what did not come from a program on this machine: local callers administrate."""
        if any(name in headers for name in FORWARDED):
            reason = "without API keys, requests through a proxy are refused (--api-keys)"
            raise Problem(403, reason, code="forwarded")
        origin = headers.get("origin")
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        else:
            own = f"http://{headers.get('host', '')}"
            is_foreign = origin not in (own, *self._options.cors_origin)
        if is_foreign:
            reason = f"a web page of {origin or 'another site'} may not call this server"
            raise Problem(403, f"{reason} (--cors-origin)", code="cross_site")

    def _bounded(self, receive: Receive) -> Receive:
        """The same with an end to what a body may hold, whatever its headers say."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._options.max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Problem:
        reason = f"the body has more than {self._options.max_body_bytes} bytes"
        return Problem(413, reason, code="body_too_large")

    def _record(
        self, scope: Scope, outcome: Outcome, started_at: float, total_s: float
    ) -> RequestRecord:
        return RequestRecord(
            request_id=outcome.request_id,
            endpoint=getattr(scope.get("route"), "path", "other"),
            tenant=outcome.tenant,
            model=self._options.model_name,
            status=outcome.status or 500,
            is_stream=outcome.is_stream,
            started_at=started_at,
            total_s=total_s,
            error=outcome.error,
            finish_reason=outcome.finish_reason,
            completions=tuple(outcome.completions),
            num_cut_tokens=outcome.num_cut_tokens,
            prompt_tokens=outcome.prompt_tokens,
            traceparent=Headers(scope=scope).get("traceparent", ""),
        )
