"""Figures of the last minute, for people without Prometheus."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.core import MatchKind
from kvboost.server.record import RequestRecord

WINDOW_S = 60.0
MOST_REQUESTS = 10_000  # that are remembered
MOST_GAPS = 64  # times between tokens that are remembered of an answer, spread over it
NUM_ERRORS = 8


@dataclass(frozen=True)
class _Seen:
    at: float
    is_error: bool
    tokens: Counter[str]
    first_token_s: list[float]
    queue_s: list[float]
    gaps_s: list[float]


class Recent:
    """The requests of the last minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._lock = threading.Lock()
        self._seen: deque[_Seen] = deque(maxlen=MOST_REQUESTS)
        self._errors: deque[dict[str, Any]] = deque(maxlen=NUM_ERRORS)
        self._num_requests = self._num_errors = 0

    def add(self, record: RequestRecord) -> None:
        """Add a request that has ended."""
        seen = _seen(record, self._clock())
        with self._lock:
            self._seen.append(seen)
            self._num_requests += 1
            self._num_errors += seen.is_error
            if seen.is_error:
                self._errors.append(
                    {
                        "at": record.started_at + record.total_s,
                        "request_id": record.request_id,
                        "endpoint": record.endpoint,
                        "status": record.status,
                        "error": record.error,
                    }
                )

    def summary(self) -> dict[str, Any]:
        """Rates and percentiles of the last minute, counts since the start, the last errors."""
        now = self._clock()
        with self._lock:
            while self._seen and self._seen[0].at < now - WINDOW_S:
                self._seen.popleft()
            seen, errors = list(self._seen), list(self._errors)
            num_requests, num_errors = self._num_requests, self._num_errors
        window_s = min(WINDOW_S, max(1.0, now - self._started_at))
        tokens = sum((each.tokens for each in seen), Counter[str]())
        kinds = [kind.value for kind in MatchKind]
        return {
            "uptime_s": now - self._started_at,
            "num_requests": num_requests,
            "num_errors": num_errors,
            "window_s": window_s,
            "requests_per_s": len(seen) / window_s,
            "errors_per_s": sum(each.is_error for each in seen) / window_s,
            "prompt_tokens_per_s": sum(tokens[kind] for kind in kinds) / window_s,
            "generated_tokens_per_s": tokens["generated"] / window_s,
            "prompt_tokens": {kind: tokens[kind] for kind in (*kinds, "repaired")},
            "ttft_s": _percentiles([s for each in seen for s in each.first_token_s]),
            "itl_s": _percentiles([s for each in seen for s in each.gaps_s]),
            "queue_s": _percentiles([s for each in seen for s in each.queue_s]),
            "recent_errors": errors,
        }


def _seen(record: RequestRecord, now: float) -> _Seen:
    tokens: Counter[str] = Counter(generated=record.generated_tokens)
    for answer in record.firsts:
        tokens["repaired"] += answer.reuse.repaired_tokens
        for kind in MatchKind:
            tokens[kind.value] += answer.reuse.tokens(kind)
    return _Seen(
        at=now,
        is_error=record.is_error,
        tokens=tokens,
        first_token_s=record.first_token_s,
        queue_s=[answer.phases.queue for answer in record.completions],
        gaps_s=[gap for gaps in record.gaps_s for gap in gaps[:: 1 + len(gaps) // MOST_GAPS]],
    )


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        name: ordered[round(share * last)] if ordered else None
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
