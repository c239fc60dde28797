"""Every metric of the server by name; users build dashboards and alerts on these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvboost import __version__
from kvboost.metrics import NAMES

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and what was measured."""

# Steps of 2 to 2.5: a quantile that Grafana reads from them is off by a third at most.
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
INTER_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.6, 1.2, 2.5)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 300.0)
PHASE_S = (0.0005, 0.002, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)


@dataclass(frozen=True)
class Stats:
    """An engine's statistics at one moment."""

    model: str
    cache: Mapping[str, Any]  # of `cache_stats`
    batch: Mapping[str, Any]  # of `batch_stats`


Read = Callable[[Stats], Iterable[Sample]]


@dataclass(frozen=True)
class Metric:
    """The definition of a metric for Prometheus."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


@dataclass(frozen=True)
class Reading:
    """A metric of the engine, and how it is read when Prometheus asks."""

    metric: Metric
    read: Read


# No tenant among the labels of requests and times: tenants x endpoints x statuses x buckets would
# be a hundred thousand series. Tenants have few counters of their own, for `MOST_TENANTS` of them.
REQUESTS = Metric(
    "kvboost_requests_total", "counter", "HTTP requests answered", ("endpoint", "status")
)
FINISHED = Metric(
    "kvboost_finished_total",
    "counter",
    "Requests by outcome: stop, length, tool_calls, cancelled or the error code",
    ("reason",),
)
TENANT_REQUESTS = Metric(
    "kvboost_tenant_requests_total", "counter", "HTTP requests answered, by tenant", ("tenant",)
)
GENERATED_TOKENS = Metric("kvboost_generated_tokens_total", "counter", "Output tokens")
TENANT_GENERATED_TOKENS = Metric(
    "kvboost_tenant_generated_tokens_total", "counter", "Output tokens, by tenant", ("tenant",)
)
REQUEST_SECONDS = Metric(
    "kvboost_request_seconds",
    "histogram",
    "From the request's arrival to the end of its answer",
    ("endpoint",),
    WHOLE_S,
)
FIRST_TOKEN_SECONDS = Metric(
    "kvboost_time_to_first_token_seconds",
    "histogram",
    "Time to first token: queue, lookup, load and prefill",
    buckets=FIRST_TOKEN_S,
)
INTER_TOKEN_SECONDS = Metric(
    "kvboost_inter_token_seconds",
    "histogram",
    "Inter-token latency: between two output tokens of an answer",
    buckets=INTER_TOKEN_S,
)
PHASE_SECONDS = Metric(
    "kvboost_phase_seconds",
    "histogram",
    "Time by phase: queue, lookup, load, prefill (with repair), decode",
    ("phase",),
    PHASE_S,
)


def _of_batch(field: str) -> Read:
    return lambda stats: [((), stats.batch[field])]


def _of_cache(field: str) -> Read:
    return lambda stats: [((), stats.cache[field])]


def _of_tiers(field: str) -> Read:
    def read(stats: Stats) -> Iterable[Sample]:
        rows = {"memory": _memory(stats.cache), **stats.cache["tiers"]}
        return [((name,), row[field]) for name, row in rows.items() if field in row]

    return read


def _memory(cache: Mapping[str, Any]) -> dict[str, float]:
    return {
        "is_up": 1,
        "num_entries": cache["hot_chunks"],
        "size_bytes": cache["hot_memory_mb"] * 2**20,
        "budget_bytes": cache["budget_mb"] * 2**20,
    }


def _tokens_by_kind(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    exact, moved = row["exact_tokens"], row["moved_tokens"]
    return [("exact", exact), ("moved", moved), ("miss", row["prompt_tokens"] - exact - moved)]


def _prompt_tokens(stats: Stats) -> Iterable[Sample]:
    return [((kind,), amount) for kind, amount in _tokens_by_kind(stats.cache)]


def _chunks(stats: Stats) -> Iterable[Sample]:
    kinds = {"exact": "exact_hits", "moved": "moved_hits", "miss": "misses"}
    return [((kind,), stats.cache[name]) for kind, name in kinds.items()]


def _tokens_of(owners: str) -> Read:
    def read(stats: Stats) -> Iterable[Sample]:
        rows = stats.cache[owners].items()
        return [((name, kind), num) for name, row in rows for kind, num in _tokens_by_kind(row)]

    return read


def _tenant_bytes(stats: Stats) -> Iterable[Sample]:
    rows = stats.cache["tenants"].items()
    return [((tenant,), row["memory_bytes"]) for tenant, row in rows]


def _index_bytes(stats: Stats) -> Iterable[Sample]:
    return [((), stats.cache["index_mb"] * 2**20)]


def _worst_kl(stats: Stats) -> Iterable[Sample]:
    found = [row["mean_kl"] for row in stats.cache["quality"].values()]
    return [((), max((kl for kl in found if kl is not None), default=0.0))]


def _without_moved(stats: Stats) -> Iterable[Sample]:
    return [((), sum(not row["moved_allowed"] for row in stats.cache["quality"].values()))]


def _gauge(name: str, text: str, read: Read, *labels: str) -> Reading:
    return Reading(Metric(f"kvboost_{name}", "gauge", text, labels), read)


def _counter(name: str, text: str, read: Read, *labels: str) -> Reading:
    return Reading(Metric(f"kvboost_{name}_total", "counter", text, labels), read)


def _engine_counter(name: str) -> Reading:
    """A counter of the engine under its own name."""
    text = NAMES[name]
    return _counter(name, text[0].upper() + text[1:], _of_cache(name))


READINGS = (
    _gauge(
        "info",
        "Always 1; version and model are in the labels",
        lambda stats: [((__version__, stats.model), 1)],
        "version",
        "model",
    ),
    _gauge("running_requests", "Running requests", _of_batch("num_running")),
    _gauge("running_requests_limit", "Limit of running requests", _of_batch("max_batch_size")),
    _gauge("waiting_requests", "Queued requests", _of_batch("num_waiting")),
    _gauge("waiting_requests_limit", "Limit of queued requests", _of_batch("max_queue_size")),
    _gauge(
        "mean_batch_size", "Mean requests per step since the start", _of_batch("mean_batch_size")
    ),
    _counter("steps", "Steps of the batch", _of_batch("num_steps")),
    _counter("preemptions", "Running requests that had to wait for room", _of_batch("preemptions")),
    _gauge("working_kv_bytes", "Bytes of K/V of running requests", _of_batch("kv_bytes")),
    _gauge("working_kv_tokens", "Tokens in the K/V of the batch", _of_batch("kv_tokens")),
    _gauge(
        "working_kv_tokens_limit",
        "Limit of tokens in the K/V of the batch",
        _of_batch("kv_capacity_tokens"),
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens reused exactly (exact), reused as moved text (moved) or not found (miss)",
        _prompt_tokens,
        "kind",
    ),
    _engine_counter("repaired_tokens"),
    _engine_counter("warmed_tokens"),
    _engine_counter("promoted_tokens"),
    _counter("chunks", "Chunks looked up", _chunks, "kind"),
    _engine_counter("stored_chunks"),
    _engine_counter("evicted_chunks"),
    _engine_counter("loaded_chunks"),
    _engine_counter("damaged_frames"),
    _engine_counter("foreign_frames"),
    _engine_counter("audits"),
    _gauge("audit_kl", "Mean KL divergence of the worst tenant's recent audits", _worst_kl),
    _gauge(
        "tenants_without_moved_text",
        "Tenants that the guardrail has set back to exact reuse",
        _without_moved,
    ),
    _gauge("tier_up", "1 while the tier works", _of_tiers("is_up"), "tier"),
    _gauge("tier_chunks", "Chunks in the tier, if known", _of_tiers("num_entries"), "tier"),
    _gauge("tier_bytes", "Bytes in the tier, if known", _of_tiers("size_bytes"), "tier"),
    _gauge(
        "tier_bytes_limit",
        "Budget of the tier in bytes; 0: none set here",
        _of_tiers("budget_bytes"),
        "tier",
    ),
    _counter("tier_hits", "Chunks found below memory", _of_tiers("hits"), "tier"),
    _counter("tier_misses", "Chunks not found below memory", _of_tiers("misses"), "tier"),
    _counter("tier_written_chunks", "Chunks written below memory", _of_tiers("written"), "tier"),
    _counter("tier_dropped_writes", "Chunks not written in time", _of_tiers("dropped"), "tier"),
    _counter(
        "tier_faults", "Failures and timeouts, which became misses", _of_tiers("faults"), "tier"
    ),
    _gauge("pinned_chunks", "Pinned chunks in memory", _of_cache("pinned_chunks")),
    _gauge("index_bytes", "Memory of the index of stored chunks", _index_bytes),
    _counter(
        "tenant_prompt_tokens", "Prompt tokens by tenant", _tokens_of("tenants"), "tenant", "kind"
    ),
    _counter(
        "adapter_prompt_tokens",
        "Prompt tokens by adapter; empty for the base model",
        _tokens_of("adapters"),
        "adapter",
        "kind",
    ),
    _gauge("tenant_memory_bytes", "Bytes of the memory tier by tenant", _tenant_bytes, "tenant"),
)

OBSERVED = (
    REQUESTS,
    FINISHED,
    TENANT_REQUESTS,
    GENERATED_TOKENS,
    TENANT_GENERATED_TOKENS,
    REQUEST_SECONDS,
    FIRST_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS,
    PHASE_SECONDS,
)
METRICS = (*OBSERVED, *(reading.metric for reading in READINGS))
