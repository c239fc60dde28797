"""Errors in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import concurrent.futures
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kvboost.config import hint
from kvboost.errors import ConfigError, DeadlineExceeded, KVBoostError, QueueFull

MOST_ECHOED = 600  # characters of a message, which may quote the request
RETRY_QUEUE_S = 1.0


class Problem(HTTPException):
    """A refused or failed request: its status and error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        retry_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        # Lone surrogates can be written in JSON and quoted here, but not be sent as UTF-8.
        message = self.detail[:MOST_ECHOED].encode("utf-8", "backslashreplace").decode()
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = dict(self.headers or {})
        if self.retry_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_s)))
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status_code, headers)


class ShuttingDown(KVBoostError):
    """The server is shutting down; another replica may answer."""


def refused(message: str, param: str | None = None) -> Problem:
    """A parameter that cannot be applied."""
    return Problem(400, message, param=param, code="unsupported_value")


def internal(request_id: str) -> Problem:
    """An internal error: the client learns its id in the log, and no more."""
    return Problem(500, f"internal error (request id {request_id})", code="internal_error")


def problem_of(error: BaseException) -> Problem | None:
    """The problem that an expected error is shown as; None for any other error."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFull):
        return Problem(503, str(error), code="queue_full", retry_s=RETRY_QUEUE_S)
    if isinstance(error, DeadlineExceeded):
        return Problem(504, str(error), code="deadline_exceeded")
    if isinstance(error, ConfigError):
        return Problem(400, str(error), code="invalid_value")
    if isinstance(error, ShuttingDown | concurrent.futures.CancelledError):
        return Problem(503, "the server is shutting down", code="shutting_down", retry_s=5.0)
    if isinstance(error, KVBoostError):
        return Problem(503, str(error), code="unavailable", retry_s=5.0)
    return None


def invalid(errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None) -> Problem:
    """Pydantic's errors about a body, as one sentence about the first wrong parameter."""
    first = errors[0]
    path = [each for each in first["loc"][1:] if _is_name(each)]
    if first["type"] == "json_invalid":
        return Problem(400, f"invalid JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "refused":
        param = ".".join(map(str, [*path, first["ctx"]["param"]]))
        return Problem(400, first["msg"], param=param, code="invalid_value")
    if first["type"] == "extra_forbidden":
        param = _dotted([*path[: -1 if _is_name(first["loc"][-1]) else None], first["loc"][-1]])
        known = body.model_fields if body is not None and len(first["loc"]) == 2 else ()
        return Problem(
            400,
            f"unknown parameter {param!r}{hint(param, known)}",
            param=param,
            code="unknown_parameter",
        )
    if not path:
        reason = "the body must be a JSON object, sent with Content-Type: application/json"
        return Problem(400, reason, code="invalid_body")
    param = _dotted(path)
    same = [each["msg"] for each in errors if each["loc"][:2] == first["loc"][:2]]
    reasons = "; or: ".join(dict.fromkeys(text.removeprefix("Value error, ") for text in same[:4]))
    return Problem(400, f"{param}: {reasons}", param=param, code="invalid_value")


def _is_name(each: str | int) -> bool:
    """Whether it names a field, rather than a tag of a union's member."""
    return isinstance(each, int) or (each != "str" and re.fullmatch("[a-z_0-9]+", each) is not None)


def _dotted(path: Sequence[str | int]) -> str:
    text = str(path[0])
    for each in path[1:]:
        text += f"[{each}]" if isinstance(each, int) else f".{each}"
    return text
