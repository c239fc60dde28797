"""API keys: caller, tenant and limits per minute.

Keys are 256 random bits, so a plain SHA-256 of them cannot be inverted by guessing; the slow
hashes that passwords need would only slow every request down.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.config import unknown_option
from kvboost.errors import ConfigError
from kvboost.server.options import read_toml
from kvboost.server.problems import Problem

MINUTE_S = 60.0
HEX_DIGITS = 64  # of a SHA-256
FIELDS: dict[str, type] = {
    "name": str,
    "tenant": str,
    "sha256": str,
    "admin": bool,
    "requests_per_minute": int,
    "tokens_per_minute": int,
}

log = logging.getLogger(__name__)


class Bucket:
    """A token bucket, refilled evenly. Used by one thread."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen_at = clock()

    def take(self, amount: float) -> float:
        """Take an amount and return 0, or return the seconds until there is enough."""
        now = self._clock()
        grown = self._level + (now - self._seen_at) * self.per_minute / MINUTE_S
        self._level, self._seen_at = min(grown, float(self.per_minute)), now
        if amount <= self._level:
            self._level -= amount
            return 0.0
        return (amount - self._level) * MINUTE_S / self.per_minute

    def give_back(self, amount: float) -> None:
        """Return what was taken and not used."""
        self._level = min(self._level + amount, float(self.per_minute))


@dataclass(frozen=True)
class Caller:
    """The caller of a request."""

    name: str = ""
    tenant: str = ""
    is_admin: bool = True
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def charge_request(self) -> None:
        """Count a request, or refuse it."""
        wait_s = self.requests.take(1) if self.requests else 0.0
        if self.requests and wait_s:
            raise _over(f"{self.requests.per_minute} requests per minute", "requests", wait_s)

    def charge_tokens(self, num_tokens: int) -> None:
        """Charge the tokens of a request, or refuse it."""
        wait_s = self.tokens.take(num_tokens) if self.tokens else 0.0
        if self.tokens and wait_s:
            limit = f"{self.tokens.per_minute} tokens per minute; this request needs {num_tokens}"
            if num_tokens > self.tokens.per_minute:  # to try again would never help
                raise _over(f"{limit}: shorten it or lower max_tokens", "tokens", None)
            raise _over(limit, "tokens", wait_s)

    def give_back_tokens(self, num_tokens: int) -> None:
        """Return tokens that were charged and not used."""
        if self.tokens:
            self.tokens.give_back(num_tokens)


class KeyRing:
    """The API keys of a server. Without keys, all callers are administrators and have no tenant."""

    def __init__(
        self, keys: Sequence[dict[str, Any]] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._callers = [(bytes.fromhex(key["sha256"]), _caller(key, clock)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._callers)

    @property
    def tenants(self) -> list[str]:
        """The tenants of all keys."""
        return sorted({caller.tenant for _, caller in self._callers}) or [Caller().tenant]

    def caller(self, authorization: str) -> Caller:
        """The caller with this `Authorization` header.

        Raises:
            Problem: 401, nobody.
        """
        if not self._callers:
            return Caller()
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = None
        for known, caller in self._callers:  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            reason = "invalid API key" if authorization else "missing API key"
            raise Problem(401, f"{reason} (Authorization: Bearer KEY)", code="invalid_api_key")
        return found


def read_keys(path: str) -> list[dict[str, Any]]:
    """The keys of a file, checked.

    Raises:
        ConfigError: the file cannot be read or says something unknown.
    """
    table = read_toml("key file", path)
    keys = table.pop("keys", [])
    if table or not isinstance(keys, list) or not keys:
        raise ConfigError(f"key file {path}: expected tables [[keys]] and nothing else")
    try:
        for number, key in enumerate(keys, 1):  # noqa: B007  (for the message)
            _check(key)
    except ConfigError as error:  # the entry is not shown: there may be a secret in it
        raise ConfigError(f"key file {path}, key {number}: {error}") from None
    if len({key["sha256"] for key in keys}) < len(keys):
        raise ConfigError(f"key file {path}: two entries have the same key")
    if os.name == "posix" and Path(path).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("key file %s: other users may change it (chmod 600)", path)
    return keys


def new_key(tenant: str, name: str, *, is_admin: bool) -> tuple[str, str]:
    """A new key, and its entry for a key file."""
    key = "kvb-" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    # Strings of JSON are strings of TOML.
    lines = [
        "[[keys]]",
        f"name = {json.dumps(name, ensure_ascii=False)}",
        f"tenant = {json.dumps(tenant, ensure_ascii=False)}",
    ]
    lines += [f'sha256 = "{digest}"', *(["admin = true"] if is_admin else [])]
    return key, "\n".join(lines) + "\n"


def _check(key: Any) -> None:
    if not isinstance(key, dict):
        raise ConfigError("expected a table")
    for name, value in key.items():
        if name not in FIELDS:
            raise unknown_option(name, FIELDS)
        if type(value) is not FIELDS[name] or (type(value) is int and value < 1):
            raise ConfigError(f"{name}={value!r}: expected {FIELDS[name].__name__}, above 0")
    digest = key.get("sha256", "")
    if len(digest) != HEX_DIGITS or set(digest) - set("0123456789abcdef"):
        raise ConfigError(f"sha256: expected {HEX_DIGITS} hex digits")
    if digest == hashlib.sha256(b"").hexdigest():
        raise ConfigError("sha256: it is that of an empty key, with which everybody comes in")
    if "tenant" not in key:
        raise ConfigError("tenant is missing")


def _caller(key: dict[str, Any], clock: Callable[[], float]) -> Caller:
    requests, tokens = key.get("requests_per_minute"), key.get("tokens_per_minute")
    return Caller(
        name=key.get("name", ""),
        tenant=key["tenant"],
        is_admin=key.get("admin", False),
        requests=None if requests is None else Bucket(requests, clock),
        tokens=None if tokens is None else Bucket(tokens, clock),
    )


def _over(limit: str, kind: str, wait_s: float | None) -> Problem:
    message = f"rate limit of this API key: {limit}"
    # OpenAI's clients retry a 429 unless this header forbids it.
    headers = {"X-Should-Retry": "false"} if wait_s is None else None
    code = "rate_limit_exceeded"
    return Problem(429, message, kind=kind, code=code, retry_s=wait_s, headers=headers)
