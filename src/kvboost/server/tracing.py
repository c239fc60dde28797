"""OpenTelemetry spans of a request and of the phases of its answers, recorded at its end."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from kvboost.errors import missing_packages

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from kvboost.engine.results import Completion
    from kvboost.server.record import RequestRecord

PHASES = ("queue", "lookup", "load", "prefill", "decode")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
# Less than OpenTelemetry's ten: with the collector down, an exit waits this long for each batch.
PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
EXPORT_S = 2.0

log = logging.getLogger(__name__)


def provider_from_environment(model: str) -> TracerProvider | None:
    """The exporter that the OTEL_* variables name, or None."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        log.warning("OTEL_* is set, but tracing is off: %s", missing_packages("it", PACKAGES))
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "kvboost")
    resource = Resource.create({"service.name": name, "kvboost.model": model})
    provider = TracerProvider(resource=resource)
    timeout_s = None if any(os.environ.get(name) for name in TIMEOUTS) else EXPORT_S
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
    return provider


class Tracing:
    """Records the spans of requests that have ended."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("kvboost")

    def record(self, record: RequestRecord) -> str:
        """Send the spans of a request; its trace id, empty if it is not sampled."""
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        parent = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})
        span = self._tracer.start_span(
            record.endpoint,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_ns(record.started_at),
            attributes=_attributes(record),
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        for number, completion in enumerate(record.completions):
            self._phases(span, record.started_at, completion, number)
        span.end(_ns(record.started_at + record.total_s))
        context = span.get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""

    def _phases(self, parent: Span, start_s: float, completion: Completion, number: int) -> None:
        """Spans of one answer, from the start of the request on.

        The engine was called a little later, when the request was read; how much is not known.
        """
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        context = set_span_in_context(parent)
        for phase in PHASES:
            stop_s = start_s + getattr(completion.phases, phase)
            if stop_s > start_s:
                attributes: dict[str, Any] = {"kvboost.choice": number}
                if phase == "prefill":
                    attributes["kvboost.repaired_tokens"] = completion.reuse.repaired_tokens
                span = self._tracer.start_span(phase, context, start_time=_ns(start_s))
                span.set_attributes(attributes)
                span.end(_ns(stop_s))
            start_s = stop_s


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Names of OpenTelemetry's conventions for HTTP and generative AI where there are any."""
    attributes: dict[str, Any] = {
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "kvboost.request_id": record.request_id,
        "kvboost.tenant": record.tenant,
        "kvboost.is_stream": record.is_stream,
    }
    if record.error:
        attributes["error.type"] = record.error
    if record.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = [record.finish_reason]
    if record.completions:
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.generated_tokens
        attributes["kvboost.cached_tokens"] = record.cached_tokens
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
