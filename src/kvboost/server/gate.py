"""Middleware of every request: id, caller, limits and record."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server.answers import ClientGone
from kvboost.server.exchange import Running
from kvboost.server.keys import Caller, KeyRing
from kvboost.server.options import ServerOptions, is_loopback
from kvboost.server.problems import Problem, ShuttingDown
from kvboost.server.record import RequestRecord
from kvboost.server.telemetry import Telemetry

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PORT = re.compile(r":[0-9]*$")
JSON_TYPE = re.compile(r"application/(\w+\+)?json\s*(;|$)", re.IGNORECASE)
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
DOCS = "/docs"
OPEN_PATHS = ("/", "/health", "/ready", "/openapi.json", DOCS)  # need no key
UNOBSERVED = ("/health", "/ready", "/metrics")
CLIENT_GONE = 499  # as other servers log it; nobody receives it


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
        """Admit a request, pass it on, and observe how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        record = RequestRecord(
            given if SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}",
            model=self._options.model_name,
            traceparent=headers.get("traceparent", ""),
        )
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = record.request_id
            await send(message)

        try:
            await self._pass(scope, receive, send_with_id, record)
        finally:
            if scope["path"] not in UNOBSERVED:
                record.total_s, record.status = record.elapsed_s, record.status or 500
                record.endpoint = getattr(scope.get("route"), "path", "other")
                self._telemetry.observe(record)

    async def _pass(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        try:
            self._admit(scope, record)
            await self._app(scope, self._bounded(receive), send)
        except ClientGone:
            record.status, record.finish_reason = CLIENT_GONE, "cancelled"
        except Exception as error:
            problem = record.fail(error)
            if record.status:  # too late to tell
                raise
            await problem.response(scope, receive, send)

    def _admit(self, scope: Scope, record: RequestRecord) -> None:
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
        record.tenant = caller.tenant
        if self._running.is_draining:
            raise ShuttingDown
        caller.charge_request()
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._options.max_body_bytes:
            raise self._too_large()

    def _check_local(self, headers: Headers) -> None:
        """Refuse requests of web pages and proxies: without keys, callers are administrators."""
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
        """`receive` with a limit of body bytes, whatever the headers say."""
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
