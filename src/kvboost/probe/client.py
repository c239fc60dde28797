"""Requests to any OpenAI-compatible server, timed, within a budget."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import httpx

from kvboost.config import key_header
from kvboost.errors import ConfigError, KVBoostError

CHARACTERS_PER_TOKEN = 4  # of prompts, where usage does not tell
REFUSED = (400, 404, 422, 501)  # a field or a path that a server does not know
BUSY = (429, 503)
LONGEST_PAUSE_S = 5.0  # before a busy server is asked once more
TIMEOUT_S = 60.0
MOST_EVENTS = 50  # of a stream, for each token that was asked for
HUNG = 10  # times as long as the slowest answer so far: it will not come any more
LEAST_HUNG_S = 5.0


class BudgetSpent(KVBoostError):
    """No request, token or second of the budget is left."""

    def __init__(self) -> None:
        super().__init__("the server is too slow for this probe: try --light")


class RequestFailed(KVBoostError):
    """The server refused a request, or did not answer it."""

    def __init__(self, status: int, text: str, retry_s: float = 1.0) -> None:
        super().__init__(f"status {status}: {text}" if status else text)
        self.status, self.retry_s = status, retry_s


@dataclass
class Budget:
    """The budget of a probe. A part of it also counts towards the whole."""

    requests: int
    tokens: int
    seconds: float
    whole: Budget | None = None
    started: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    num_tokens: int = 0
    slowest_s: float = 0.0  # of the answers so far
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        own_s = self.started + self.seconds - time.monotonic()
        return own_s if self.whole is None else min(own_s, self.whole.left_s)

    def part(self, seconds: float) -> Budget:
        """A part with all requests and tokens, but these seconds from now on."""
        return Budget(self.requests, self.tokens, seconds, whole=self)

    def spend(self, num_tokens: int) -> None:
        """Count a request.

        Raises:
            BudgetSpent: it would be one too many.
        """
        with self._lock:
            if (
                self.left_s < 0
                or self.num_requests >= self.requests
                or self.num_tokens >= self.tokens
            ):
                raise BudgetSpent
            if self.whole is not None:
                self.whole.spend(num_tokens)
            self.num_requests += 1
            self.num_tokens += num_tokens

    def answered(self, seconds: float) -> None:
        """Note how long an answer took."""
        self.slowest_s = max(self.slowest_s, seconds)
        if self.whole is not None:
            self.whole.answered(seconds)

    def is_hung(self, seconds: float) -> bool:
        """Whether a request that took so long will not be answered any more."""
        slowest_s = (self.whole or self).slowest_s
        return seconds >= min(TIMEOUT_S, max(LEAST_HUNG_S, HUNG * slowest_s))


@dataclass(frozen=True)
class Reply:
    """An answer, and what the server said about it."""

    text: str
    ttft_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    logprob: float | None  # of the first token


@dataclass(frozen=True)
class Server:
    """A server, as one of its clients."""

    http: httpx.Client
    model: str
    budget: Budget
    key: str = field(default="", repr=False)
    limit_name: str = "max_tokens"
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of each request

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header, if there is a key."""
        return key_header(self.key)

    def ask(self, prompt: str, max_tokens: int, *, stream: bool = True) -> Reply:
        """A greedy answer to a prompt.

        Raises:
            BudgetSpent: there are no more requests.
            RequestFailed: the server refused it or broke it off.
        """
        num_tokens = len(prompt) // CHARACTERS_PER_TOKEN + max_tokens
        self.budget.spend(num_tokens)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            self.limit_name: max_tokens,
            "temperature": 0,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **self.extra,
        }
        try:
            return self._asked(body)
        except RequestFailed as error:
            if error.status not in BUSY:
                raise
            time.sleep(min(error.retry_s, LONGEST_PAUSE_S, max(0.0, self.budget.left_s)))
            self.budget.spend(num_tokens)
            return self._asked(body)

    def _asked(self, body: dict[str, Any]) -> Reply:
        started, timeout_s = perf_counter(), min(TIMEOUT_S, max(1.0, self.budget.left_s))
        events: list[dict[str, Any]] = []
        first_s = None
        try:
            with self.http.stream(
                "POST", "/chat/completions", json=body, headers=self.headers, timeout=timeout_s
            ) as reply:
                if reply.status_code != 200:
                    raise _failure(reply.status_code, reply.read(), reply.headers)
                for event in _events(reply) if body["stream"] else [json.loads(reply.read())]:
                    events.append(event)
                    since_s = perf_counter() - started
                    if first_s is None and _text(event):
                        first_s = since_s
                    if len(events) > MOST_EVENTS * body[self.limit_name]:
                        raise RequestFailed(0, f"the stream did not end in {len(events)} events")
                    if since_s > timeout_s:
                        raise httpx.ReadTimeout("the stream did not end")
            took_s = perf_counter() - started
            self.budget.answered(took_s)
            return _reply(events, took_s, first_s)
        except httpx.TimeoutException as error:
            since_s = perf_counter() - started
            if not self.budget.is_hung(since_s):  # our time is over: not the server's fault
                raise BudgetSpent from error
            raise RequestFailed(0, f"no whole answer in {since_s:.0f} s") from error
        except httpx.HTTPError as error:
            raise RequestFailed(0, type(error).__name__) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed(0, f"not an OpenAI-style reply ({type(error).__name__})") from error


def connect(url: str, model: str | None, key: str, budget: Budget) -> Server:
    """The server at `url`, which ends in /v1; without a model, the first that it lists.

    No redirect is followed and no proxy of the environment is used: nobody else is asked.

    Raises:
        KVBoostError: it cannot be reached, or lists no model.
    """
    key_header(key)  # or raise before anything is sent
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError("the URL holds a password: pass the key by --key instead")
    base = url.rstrip("/")
    http = httpx.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False)
    try:
        http.base_url = httpx.URL(base)
        server = Server(http, model or "", budget, key)
        if model is not None:
            return server
        reply = http.get("/models", headers=server.headers)
        if reply.status_code != 200:
            raise _failure(reply.status_code, reply.content, reply.headers)
        return replace(server, model=str(reply.json()["data"][0]["id"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        reason = str(error) or type(error).__name__
    except RequestFailed as error:
        reason = str(error)
    http.close()
    raise KVBoostError(
        f"{base}/models: {reason}; is this the base URL, with its /v1? Servers that list no models "
        "need --model"
    )


def _failure(status: int, content: bytes, headers: httpx.Headers) -> RequestFailed:
    text = " ".join(content.decode(errors="replace").split())[:200]
    wish = headers.get("Retry-After", "")
    return RequestFailed(status, text, float(wish) if wish.isdecimal() else 1.0)


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
            yield json.loads(text)


def _piece(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices") or [{}]
    return choices[0].get("delta") or choices[0].get("message") or {}


def _text(event: dict[str, Any]) -> str:
    """What an event adds to the answer; reasoning is a part of it."""
    piece = _piece(event)
    names = ("reasoning_content", "reasoning", "content")
    return "".join(text for name in names if isinstance(text := piece.get(name), str))


def _reply(events: list[dict[str, Any]], total_s: float, first_s: float | None) -> Reply:
    for event in events:
        if error := event.get("error"):
            raise RequestFailed(200, str(error)[:200])
    usage: dict[str, Any] = next((e["usage"] for e in reversed(events) if e.get("usage")), {})
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        text="".join(map(_text, events)),
        ttft_s=total_s if first_s is None else first_s,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
        logprob=_first_logprob(events),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _first_logprob(events: list[dict[str, Any]]) -> float | None:
    for event in events:
        for choice in event.get("choices") or []:
            for token in (choice.get("logprobs") or {}).get("content") or []:
                return float(token["logprob"])
    return None
