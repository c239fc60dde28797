"""Telemetry of each request: metrics, a log line, spans, and figures of the last minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvboost.metrics import counted_as
from kvboost.server import metrics
from kvboost.server.keys import Bucket
from kvboost.server.logs import log_fields
from kvboost.server.metrics import Metric, Stats
from kvboost.server.recent import Recent
from kvboost.server.record import RequestRecord
from kvboost.server.tracing import PHASES, Tracing, provider_from_environment

UNKNOWN_CALLER = 401
LOGGED_PER_MINUTE = 60  # requests of unknown callers

log = logging.getLogger("kvboost.request")

WATCHED = "/v1/stats"


class Engine(Protocol):
    """The statistics of an engine."""

    def cache_stats(self) -> dict[str, Any]:
        """Sizes and counts of what is stored."""

    def batch_stats(self) -> dict[str, Any]:
        """Running and waiting requests."""


class Telemetry:
    """Counts, logs and traces requests; each has a registry of its own."""

    def __init__(self, engine: Engine, *, model: str) -> None:
        # Or each counter would come with a second series, of its age.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        ProcessCollector(registry=self._registry)
        self._requests = self._counter(metrics.REQUESTS)
        self._finished = self._counter(metrics.FINISHED)
        self._tenant_requests = self._counter(metrics.TENANT_REQUESTS)
        self._generated = self._counter(metrics.GENERATED_TOKENS)
        self._tenant_generated = self._counter(metrics.TENANT_GENERATED_TOKENS)
        self._request_s = self._histogram(metrics.REQUEST_SECONDS)
        self._first_token_s = self._histogram(metrics.FIRST_TOKEN_SECONDS)
        self._inter_token_s = self._histogram(metrics.INTER_TOKEN_SECONDS)
        self._phase_s = self._histogram(metrics.PHASE_SECONDS)
        self._tenants: set[str] = set()
        self._recent = Recent()
        self._strangers = Bucket(LOGGED_PER_MINUTE, time.monotonic)
        provider = provider_from_environment(model)
        self._tracing = None if provider is None else Tracing(provider)

    def observe(self, record: RequestRecord) -> None:
        """Count, log and trace a request that has ended. Thread-safe; does not wait."""
        self._count(record)
        self._recent.add(record)
        trace_id = "" if self._tracing is None else self._tracing.record(record)
        if record.status == UNKNOWN_CALLER and self._strangers.take(1):
            return  # guessing keys must not fill the disk; the metrics count every attempt
        level = logging.WARNING if record.status >= 500 else logging.INFO
        if record.endpoint == WATCHED and not record.is_error:
            level = logging.DEBUG  # `kvboost top` asks every second
        log_fields(log, level, "request", {**_fields(record), "trace_id": trace_id})

    def render(self) -> tuple[bytes, str]:
        """All metrics as Prometheus reads them, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def summary(self) -> dict[str, Any]:
        """The last minute in figures: the part "requests" of /v1/stats."""
        return self._recent.summary()

    def _count(self, record: RequestRecord) -> None:
        tenant = counted_as(record.tenant, self._tenants)
        self._tenants.add(tenant)
        self._requests.labels(record.endpoint, str(record.status)).inc()
        self._tenant_requests.labels(tenant).inc()
        reason = record.error or record.finish_reason
        if reason:
            self._finished.labels(reason).inc()
        self._request_s.labels(record.endpoint).observe(record.total_s)
        self._generated.inc(record.generated_tokens)
        self._tenant_generated.labels(tenant).inc(record.generated_tokens)
        for first_token_s in record.first_token_s:
            self._first_token_s.observe(first_token_s)
        for gap_s in (gap for gaps in record.gaps_s for gap in gaps):
            self._inter_token_s.observe(gap_s)
        for answer in record.completions:
            for phase in PHASES:
                self._phase_s.labels(phase).observe(getattr(answer.phases, phase))

    def _counter(self, of: Metric) -> Counter:
        return Counter(of.name, of.help, of.labels, registry=self._registry)

    def _histogram(self, of: Metric) -> Histogram:
        return Histogram(of.name, of.help, of.labels, buckets=of.buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the engine's statistics when Prometheus asks."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Nothing: otherwise the engine would be asked when the collector is registered."""
        return ()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """All readings."""
        stats = Stats(self._model, self._engine.cache_stats(), self._engine.batch_stats())
        for reading in metrics.READINGS:
            of = reading.metric
            make = CounterMetricFamily if of.kind == "counter" else GaugeMetricFamily
            family = make(of.name, of.help, labels=of.labels)
            for labels, value in reading.read(stats):
                family.add_metric(labels, value)
            yield family


def _fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of the log line; none has text of the prompt or the output."""
    first = record.completions[0].phases if record.completions else None
    first_token_s = record.first_token_s
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "endpoint": record.endpoint,
        "model": record.model,
        "status": record.status,
        "stream": record.is_stream,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.generated_tokens,
        "total_ms": _ms(record.total_s),
        "queue_ms": None if first is None else _ms(first.queue),
        "ttft_ms": _ms(first_token_s[0]) if first_token_s else None,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
