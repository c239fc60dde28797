"""What is counted of requests and of the engine, as Prometheus and `/v1/stats` get it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.metrics import MOST_TENANTS, NAMES, OTHER_TENANTS
from kvboost.server.metrics import METRICS, READINGS, Stats
from kvboost.server.recent import MOST_GAPS, WINDOW_S, Recent
from kvboost.server.telemetry import Telemetry
from serving import FakeEngine, completion, failed, record
from tiny_models import SUPPORTED, build
from waiting import at_once


def samples(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    """(name, values of the labels, sorted by their names ...) -> value."""
    body, content_type = telemetry.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def told(*records: Any) -> dict[tuple[str, ...], float]:
    telemetry = Telemetry(FakeEngine(), model="smol")
    for each in records:
        telemetry.observe(each)
    return samples(telemetry)


def test_every_metric_is_exported_as_it_is_described() -> None:
    telemetry = Telemetry(FakeEngine(), model="smol")
    telemetry.observe(record())
    telemetry.observe(failed())
    body = telemetry.render()[0].decode()
    families = {f.name: f for f in text_string_to_metric_families(body)}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    assert all(name.startswith("process_") for name in families)


class Watched(dict[str, Any]):
    """A mapping that remembers what was read of it."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def test_every_counter_of_the_engine_has_a_reading() -> None:
    engine = FakeEngine()
    cache = Watched(engine.cache_stats())
    stats = Stats("smol", cache, engine.batch_stats())
    for reading in READINGS:
        assert list(reading.read(stats)), reading.metric.name
    # The server counts requests itself; the other two are read for each tier.
    assert set(NAMES) - cache.read == {"requests", "dropped_writes", "tier_faults"}


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("kvboost_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.buckets == tuple(sorted(metric.buckets))


def test_a_request_is_counted_once_and_its_tokens_by_number() -> None:
    seen = told(record(), record(tenant="b"), failed())
    assert seen["kvboost_requests_total", "/v1/chat/completions", "200"] == 2
    assert seen["kvboost_requests_total", "/v1/chat/completions", "503"] == 1
    assert seen["kvboost_finished_total", "stop"] == 2
    assert seen["kvboost_finished_total", "queue_full"] == 1
    assert seen["kvboost_tenant_requests_total", "a"] == 2
    assert seen["kvboost_generated_tokens_total",] == 6
    assert seen["kvboost_tenant_generated_tokens_total", "b"] == 3


def test_times_are_those_of_the_tokens() -> None:
    seen = told(record())
    assert seen["kvboost_time_to_first_token_seconds_sum",] == 0.5
    assert seen["kvboost_inter_token_seconds_count",] == 2
    assert seen["kvboost_inter_token_seconds_sum",] == 0.375
    assert seen["kvboost_request_seconds_sum", "/v1/chat/completions"] == 1.0
    assert seen["kvboost_phase_seconds_sum", "queue"] == 0.1
    assert seen["kvboost_phase_seconds_sum", "decode"] == 0.375


def test_each_answer_of_several_has_its_own_times() -> None:
    seen = told(record(completions=(completion(), completion((1.0,)))))
    assert seen["kvboost_time_to_first_token_seconds_sum",] == 1.5
    assert seen["kvboost_generated_tokens_total",] == 4
    assert seen["kvboost_inter_token_seconds_count",] == 2


def test_an_answer_without_tokens_has_no_first_token() -> None:
    seen = told(record(completions=(completion(()),)))
    assert seen["kvboost_time_to_first_token_seconds_count",] == 0


def test_the_engine_is_read_when_asked() -> None:
    seen = told()
    assert seen["kvboost_running_requests",] == 11
    assert seen["kvboost_prompt_tokens_total", "exact"] == 600
    assert seen["kvboost_prompt_tokens_total", "miss"] == 100
    assert seen["kvboost_tier_bytes", "memory"] == 700 * 2**20
    assert seen["kvboost_tier_up", "redis"] == 0
    assert seen["kvboost_tier_faults_total", "redis"] == 3
    assert ("kvboost_tier_faults_total", "memory") not in seen
    assert seen["kvboost_audit_kl",] == 0.2
    assert seen["kvboost_tenants_without_moved_text",] == 1
    assert seen["kvboost_tenant_prompt_tokens_total", "miss", "a"] == 10
    assert seen["kvboost_tenant_memory_bytes", "a"] == 4096


def test_many_tenants_make_no_more_series_than_allowed() -> None:
    seen = told(*(failed(tenant=f"t{number}") for number in range(MOST_TENANTS + 5)))
    tenants = [key for key in seen if key[0] == "kvboost_tenant_requests_total"]
    assert len(tenants) == MOST_TENANTS + 1
    assert seen["kvboost_tenant_requests_total", OTHER_TENANTS] == 5


def test_threads_lose_no_request() -> None:
    telemetry = Telemetry(FakeEngine(), model="smol")
    at_once(lambda _: [telemetry.observe(record()) for _ in range(100)], range(4))
    assert samples(telemetry)["kvboost_tenant_requests_total", "a"] == 400
    assert telemetry.summary()["num_requests"] == 400


def test_one_log_line_tells_of_a_request_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(FakeEngine(), model="smol")
    with caplog.at_level(logging.INFO, "kvboost.request"):
        telemetry.observe(record())
        telemetry.observe(failed())
    fine, bad = (each.kvboost_fields for each in caplog.records)
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING"]
    assert (fine["request_id"], fine["tenant"], fine["status"]) == ("req-1", "a", 200)
    assert (fine["prompt_tokens"], fine["cached_tokens"], fine["generated_tokens"]) == (100, 85, 3)
    assert (fine["ttft_ms"], fine["queue_ms"], fine["total_ms"]) == (500.0, 100.0, 1000.0)
    assert (bad["error"], bad["ttft_ms"], bad["finish_reason"]) == ("queue_full", None, "")
    assert "secret" not in str(fine)


def test_watching_a_server_leaves_its_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(FakeEngine(), model="smol")
    with caplog.at_level(logging.INFO, "kvboost.request"):
        telemetry.observe(replace(record(), endpoint="/v1/stats"))
        assert caplog.records == []
        telemetry.observe(replace(failed(), endpoint="/v1/stats"))
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_the_last_minute_is_summed_up() -> None:
    now = [100.0]
    recent = Recent(lambda: now[0])
    now[0] += 10
    recent.add(record())
    recent.add(record(completions=(completion((1.5,)),)))
    recent.add(failed())
    summary = recent.summary()
    assert summary["window_s"] == 10
    assert summary["requests_per_s"] == 0.3
    assert summary["errors_per_s"] == 0.1
    assert summary["generated_tokens_per_s"] == 0.4
    assert summary["prompt_tokens_per_s"] == 20
    tokens = {"exact": 120, "moved": 60, "miss": 20, "repaired": 10}
    assert summary["prompt_tokens"] == tokens
    assert summary["ttft_s"] == {"p50": 0.5, "p95": 1.5}
    assert summary["itl_s"] == {"p50": 0.125, "p95": 0.25}
    assert [each["error"] for each in summary["recent_errors"]] == ["queue_full"]


def test_what_is_older_than_a_minute_is_only_counted() -> None:
    now = [0.0]
    recent = Recent(lambda: now[0])
    recent.add(failed())
    now[0] = WINDOW_S + 1
    summary = recent.summary()
    assert summary["requests_per_s"] == 0
    assert summary["ttft_s"] == {"p50": None, "p95": None}
    assert (summary["num_requests"], summary["num_errors"]) == (1, 1)


def test_a_stream_that_broke_is_an_error_though_its_status_is_200() -> None:
    recent = Recent()
    recent.add(record(error="deadline_exceeded"))
    recent.add(failed(499, "", finish_reason="cancelled"))  # a caller who went away is no error
    assert recent.summary()["num_errors"] == 1


def test_a_long_answer_is_remembered_by_a_few_of_its_gaps() -> None:
    recent = Recent()
    recent.add(record(completions=(completion(tuple(float(n) for n in range(5000))),)))
    assert recent.summary()["itl_s"] == {"p50": 1.0, "p95": 1.0}
    assert len(recent._seen[0].gaps_s) <= MOST_GAPS


@pytest.mark.tiny
def test_a_real_engine_says_all_that_is_read() -> None:
    class Both(FakeEngine):
        def cache_stats(self) -> dict[str, Any]:
            return engine.cache_stats()

    with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), chunk_size=16) as engine:
        telemetry = Telemetry(Both(), model="tiny")
        for _ in range(2):
            engine.generate(words(40), 2, tenant="a")
        engine.flush()
        seen = samples(telemetry)
    assert seen["kvboost_prompt_tokens_total", "exact"] == 39
    assert seen["kvboost_tenant_prompt_tokens_total", "miss", "a"] == 41
    assert seen["kvboost_tier_bytes", "memory"] == seen["kvboost_tenant_memory_bytes", "a"] > 0


def test_all_prompts_of_a_request_are_counted() -> None:
    recent, each = Recent(), completion()
    recent.add(record(completions=(each, each, each), firsts=[each, each]))
    kinds = recent.summary()["prompt_tokens"]
    assert (kinds["exact"] + kinds["moved"] + kinds["miss"], kinds["repaired"]) == (200, 10)
