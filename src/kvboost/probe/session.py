"""A probe from start to end: within its budget, with all findings."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvboost.config import key_header
from kvboost.errors import ConfigError, KVBoostError
from kvboost.probe.client import (
    BUSY,
    REFUSED,
    Budget,
    RequestFailed,
    Server,
    connect,
)
from kvboost.probe.fast import Fast
from kvboost.probe.findings import AREAS, Finding, Report
from kvboost.probe.right import NUM_WORDS, Right, compare, remember
from kvboost.probe.separate import check
from kvboost.probe.texts import Texts


@dataclass(frozen=True)
class Size:
    """How much a probe asks."""

    documents: int
    rounds: int  # more of all documents beside each other
    load: int  # requests at a time
    pairs: int
    trials: int
    requests: int
    tokens: int
    seconds: float


WHOLE = Size(11, 1, 8, 3, 8, requests=200, tokens=400_000, seconds=120.0)
LIGHT = Size(5, 0, 1, 3, 7, requests=120, tokens=400_000, seconds=60.0)
SHARES = {"right": 0.5, "fast": 0.3}  # of the time; the rest is for separation


def run(  # noqa: PLR0913
    url: str,
    *,
    model: str | None = None,
    key: str = "",
    other_key: str = "",
    salt: bool = False,
    light: bool = False,
    load: int | None = None,
    before: str | Path | None = None,
    after: str | Path | None = None,
) -> Report:
    """Probe the cache of the OpenAI-compatible server at `url`.

    Args:
        url: Base URL with its /v1. No other host is asked.
        model: Name of the model; by default the first that the server lists.
        key: API key.
        other_key: API key of another client: what one asked must not show to the other.
        salt: Whether requests with different `cache_salt` must be separate.
        light: Ask half as much, and nothing at the same time.
        load: Requests at a time, beside each other.
        before: Ask new prompts only and write them with their answers to this file.
        after: Compare with such a file, after a restart or an upgrade.

    Raises:
        KVBoostError: the server cannot be probed.

    Example:
        >>> from kvboost.probe import run
        >>> report = run("http://127.0.0.1:8000/v1")
        >>> assert report.ok, [each.sentence for each in report.findings if each.light == "red"]
    """
    if before and after:
        raise ConfigError("before and after are two runs: pass one of them")
    if other_key and salt:
        raise ConfigError("other_key and salt are two checks: pass one of them")
    key_header(other_key)  # or raise before anything is sent
    size = LIGHT if light else WHOLE
    size = replace(size, load=size.load if load is None else load)
    started = time.monotonic()
    budget = Budget(size.requests, size.tokens, size.seconds)
    server = connect(url, model, key, budget)
    try:
        texts = Texts(secrets.token_hex(8))
        server = _greeted(server, texts)
        if before or after:
            findings = _restarted(server, texts, size, before, after)
        else:
            other = replace(server, key=other_key) if other_key else None
            findings = _probed(server, texts, size, other, is_salt_promised=salt)
    finally:
        server.http.close()
    return Report(
        url=url,
        model=server.model,
        findings=tuple(sorted(findings, key=lambda each: AREAS.index(each.area))),
        num_requests=budget.num_requests,
        num_tokens=budget.num_tokens,
        seconds=round(time.monotonic() - started, 1),
    )


def _greeted(server: Server, texts: Texts) -> Server:
    """The server, woken up, with the names of fields it takes, and log-probabilities if it can."""
    prompt = texts.document(40).prompt
    try:
        server.ask(prompt, 2)
    except RequestFailed as error:
        if error.status not in REFUSED or "max_tokens" not in str(error):
            raise KVBoostError(f"{server.http.base_url}: {error}") from error
        server = replace(server, limit_name="max_completion_tokens")
        server.ask(prompt, 2)
    able = replace(server, extra={"logprobs": True})
    try:
        return able if able.ask(prompt, 2).logprob is not None else server
    except RequestFailed:
        return server


def _probed(
    server: Server, texts: Texts, size: Size, other: Server | None, *, is_salt_promised: bool
) -> list[Finding]:
    right = Right(_within(server, size, "right"), texts)
    right.run(size.documents, size.load, size.rounds)
    plain = replace(server, extra={})
    fast = Fast(_within(plain, size, "fast"), texts)
    fast.run(size.pairs)
    found = [*right.findings(has_hits=fast.has_hits), *fast.findings(right.pairs())]
    failures = [*right.failures, *fast.failures]
    if not (fast.has_hits or right.num_cached):
        said = "No hit is seen, so there is nothing to check."
        found.append(Finding("separate", "clients", "grey", said))
        return [*found, _requests(server.budget, failures)]
    if other is not None:
        victim, reader, how = plain, replace(other, extra={}), "another API key"
    else:
        victim, reader = (
            replace(plain, extra={"cache_salt": texts.salt() + texts.salt()}) for _ in range(2)
        )
        how = "another cache_salt" if is_salt_promised else "cache_salt"
    trials = {"num_words": fast.longest or NUM_WORDS, "num_trials": size.trials}
    found.append(check(victim, reader, texts, failures, how=how, **trials))
    return [*found, _requests(server.budget, failures)]


def _requests(budget: Budget, failures: Sequence[RequestFailed]) -> Finding:
    figures = {"failed": len(failures), "sent": budget.num_requests}
    if not failures:
        said = f"All {budget.num_requests} requests were answered."
        return Finding("right", "requests", "green", said, figures)
    said = f"{len(failures)} of {budget.num_requests} requests failed; the first: {failures[0]}"
    is_busy = all(each.status in BUSY for each in failures)
    return Finding("right", "requests", "yellow" if is_busy else "red", said, figures)


def _within(server: Server, size: Size, part: str) -> Server:
    return replace(server, budget=server.budget.part(SHARES[part] * size.seconds))


def _restarted(
    server: Server, texts: Texts, size: Size, before: str | Path | None, after: str | Path | None
) -> list[Finding]:
    if before:
        kept = remember(server, texts, size.documents)
        Path(before).write_text(json.dumps(kept), encoding="utf-8")
        said = f"{len(kept['asked'])} prompts and answers are in {before}. Restart, then --after."
        return [Finding("right", "restart", "green", said)]
    try:
        kept = json.loads(Path(after or "").read_text(encoding="utf-8"))
        if kept["model"] != server.model:
            raise KVBoostError(f"{after} is of model {kept['model']!r}, not {server.model!r}")
        right = compare(server, texts, kept)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{after} was not written by --before: {error}") from error
    found = right.findings(has_hits=True)  # a server may start without its cache
    return [*found, _requests(server.budget, right.failures)]
