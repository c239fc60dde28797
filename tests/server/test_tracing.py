"""Spans of requests, as an exporter gets them."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvboost.engine.results import Phases
from kvboost.server.record import RequestRecord
from kvboost.server.tracing import PHASES, Tracing, provider_from_environment
from serving import completion, failed, record

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(request: RequestRecord) -> tuple[str, ReadableSpan, list[ReadableSpan]]:
    """The trace id, the span of a request, and those below it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_id = Tracing(provider).record(request)
    *phases, whole = exporter.get_finished_spans()
    return trace_id, whole, phases


def test_phases_follow_each_other_below_the_request() -> None:
    trace_id, whole, phases = traced(record())
    assert tuple(each.name for each in phases) == PHASES
    assert whole.name == "/v1/chat/completions"
    assert (whole.start_time, whole.end_time) == (1_700_000_000_000_000_000, 1_700_000_001 * 10**9)
    assert phases[0].start_time == whole.start_time
    for before, after in pairwise(phases):
        assert before.end_time == after.start_time
    assert phases[-1].end_time <= whole.end_time
    assert {each.parent.span_id for each in phases} == {whole.context.span_id}
    assert {each.context.trace_id for each in phases} == {int(trace_id, 16)}


def test_a_request_goes_on_with_the_trace_of_its_caller() -> None:
    trace_id, whole, _ = traced(record(traceparent=f"00-{TRACE}-{PARENT}-01"))
    assert trace_id == TRACE and f"{whole.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize("header", ["", "junk", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-x-01"])
def test_a_broken_traceparent_starts_a_trace_of_its_own(header: str) -> None:
    trace_id, whole, _ = traced(record(traceparent=header))
    assert whole.parent is None and trace_id not in (TRACE, "")


def test_a_caller_who_samples_nothing_gets_nothing() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert Tracing(provider).record(record(traceparent=f"00-{TRACE}-{PARENT}-00")) == ""
    assert exporter.get_finished_spans() == ()


def test_attributes_tell_tokens_and_no_text() -> None:
    _, whole, phases = traced(record())
    assert whole.attributes["gen_ai.usage.input_tokens"] == 100
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert whole.attributes["kvboost.cached_tokens"] == 85
    assert whole.attributes["http.response.status_code"] == 200
    prefill = next(each for each in phases if each.name == "prefill")
    assert prefill.attributes["kvboost.repaired_tokens"] == 5
    assert "secret" not in str([each.attributes for each in (whole, *phases)])


def test_a_failed_request_is_a_span_with_an_error() -> None:
    _, whole, phases = traced(failed())
    assert phases == [] and whole.status.status_code is StatusCode.ERROR
    assert whole.attributes["error.type"] == "queue_full"
    _, whole, _ = traced(failed(400, "invalid_request_error"))
    assert whole.status.status_code is StatusCode.UNSET  # the caller's fault, not the server's


def test_answers_of_one_request_are_told_apart_and_empty_phases_left_out() -> None:
    short = completion(phases=Phases(queue=0.1, prefill=0.2))
    _, _, phases = traced(record(completions=(completion(), short)))
    names = [each.name for each in phases if each.attributes["kvboost.choice"] == 1]
    assert names == ["queue", "prefill"]


def test_without_a_place_to_send_to_tracing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert provider_from_environment("smol") is None


def test_the_environment_turns_tracing_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    provider = provider_from_environment("smol")
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert provider_from_environment("smol") is None


def test_a_missing_package_is_told_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert provider_from_environment("smol") is None
    assert "pip install opentelemetry-sdk" in caplog.text
