"""Stand-ins for what a server tells of: an engine's figures, and requests that have ended."""

from __future__ import annotations

from typing import Any

from kvboost.core import MatchKind, Span
from kvboost.engine.results import Completion, Phases, ReuseReport, SpanReport
from kvboost.metrics import NAMES
from kvboost.server.record import RequestRecord

DISK = {
    "is_up": True,
    "num_entries": 9000,
    "size_bytes": 3 << 30,
    "budget_bytes": 8 << 30,
    "hits": 812,
    "misses": 97,
    "written": 9100,
    "dropped": 0,
    "faults": 0,
}
REDIS = {**DISK, "is_up": False, "budget_bytes": 0, "dropped": 37, "faults": 3}


class FakeEngine:
    """Figures like those of a busy engine."""

    def cache_stats(self) -> dict[str, Any]:
        counts = dict.fromkeys(NAMES, 5)
        counts |= {"prompt_tokens": 1000, "exact_tokens": 600, "moved_tokens": 300}
        return {
            "hot_chunks": 1200,
            "hot_memory_mb": 700.0,
            "budget_mb": 1024.0,
            "pinned_chunks": 4,
            "cache_hits": 10,
            "approximate_hits": 5,
            "cache_misses": 5,
            "hit_rate": 0.66,
            "exact_hit_rate": 0.33,
            "index_mb": 1.5,
            "quality": {
                "a": {"moved_allowed": True, "mean_kl": 0.01},
                "b": {"moved_allowed": False, "mean_kl": 0.2},
                "c": {"moved_allowed": True, "mean_kl": None},
            },
            "tenants": {
                "a": {
                    "requests": 3,
                    "prompt_tokens": 100,
                    "exact_tokens": 60,
                    "moved_tokens": 30,
                    "cache_hits": 8,
                    "approximate_hits": 3,
                    "cache_misses": 1,
                    "memory_bytes": 4096,
                }
            },
            "adapters": {"": {"prompt_tokens": 90, "exact_tokens": 50, "moved_tokens": 0}},
            "tiers": {"disk": DISK, "redis": REDIS},
            **counts,
        }

    def batch_stats(self) -> dict[str, Any]:
        return {
            "num_running": 11,
            "num_waiting": 3,
            "max_batch_size": 16,
            "max_queue_size": 256,
            "num_steps": 12345,
            "preemptions": 6,
            "mean_batch_size": 7.5,
            "kv_bytes": 5 << 20,
            "kv_tokens": 4000,
            "kv_capacity_tokens": 20000,
        }


SPANS = (
    SpanReport(Span(0, 60), MatchKind.EXACT),
    SpanReport(Span(60, 90), MatchKind.MOVED),
    SpanReport(Span(90, 100), MatchKind.MISS),
)


def completion(token_times: tuple[float, ...] = (0.5, 0.75, 0.875), **changes: Any) -> Completion:
    """An answer on a prompt of 100 tokens, of which 85 were not computed."""
    fields: dict[str, Any] = {
        "text": "the secret answer",
        "token_ids": tuple(range(len(token_times))),
        "finish_reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 85,
        "reuse": ReuseReport(SPANS, repaired_tokens=5),
        "phases": Phases(queue=0.1, lookup=0.0625, load=0.125, prefill=0.2125, decode=0.375),
        "token_times": token_times,
    }
    return Completion(**{**fields, **changes})


def record(**changes: Any) -> RequestRecord:
    """A chat that went well."""
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "endpoint": "/v1/chat/completions",
        "tenant": "a",
        "model": "smol",
        "status": 200,
        "is_stream": True,
        "started_at": 1_700_000_000.0,
        "total_s": 1.0,
        "finish_reason": "stop",
        "completions": (completion(),),
    }
    fields |= changes
    answers = fields["completions"]
    fields.setdefault("firsts", answers[:1])
    fields.setdefault("prompt_tokens", answers[0].prompt_tokens if answers else 0)
    return RequestRecord(**fields)


def failed(status: int = 503, error: str = "queue_full", **changes: Any) -> RequestRecord:
    """A request that was not answered."""
    nothing = {"finish_reason": "", "completions": ()}
    return record(status=status, error=error, **{**nothing, **changes})
