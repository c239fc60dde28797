"""Write the Grafana dashboard: rows of panels, each a few PromQL expressions over our metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "docs" / "grafana" / "kvboost.json"
COLUMNS = 24  # of Grafana's grid
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
KINDS = {"exact": "green", "moved": "yellow", "miss": "#808080"}
WINDOW = "$__rate_interval"

Query = tuple[str, str]
"""PromQL and the legend of its series. `@` stands for the selector of the chosen instances."""


def rate(metric: str, legend: str = "", *, only: str = "", most: int | None = None) -> Query:
    """How fast a counter of ours grows. Labels in the legend, as {{label}}, are what it is by."""
    by = ", ".join(part.split("}}")[0] for part in legend.split("{{")[1:])
    total = f"sum by ({by})" if by else "sum"
    query = f"{total}(rate(kvboost_{metric}{_selector(only)}[{WINDOW}]))"
    return (f"topk({most}, {query})" if most else query), legend


def _selector(only: str) -> str:
    """The chosen instances, and of their series those with a label as `only` says."""
    return f'{{{only}, instance=~"$instance"}}' if only else "@"


def of_vllm(metric: str, legend: str) -> Query:
    """How fast a counter of vLLM grows; ours there are called kvboost_*."""
    return f"sum(rate(vllm:{metric}_total@[{WINDOW}]))", legend


def gauge(metric: str, legend: str = "") -> Query:
    """A value of ours, of all instances together."""
    return f"sum(kvboost_{metric}@)", legend


def quantile(share: float, metric: str, legend: str = "", *, only: str = "", by: str = "") -> Query:
    """A quantile of a histogram of ours."""
    buckets = f"rate(kvboost_{metric}_bucket{_selector(only)}[{WINDOW}])"
    by = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({by})({buckets}))", legend


def quantiles(metric: str) -> list[Query]:
    """The quantiles that are drawn of a histogram."""
    return [quantile(share, metric, f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)]


def series(
    title: str, *queries: Query, unit: str = "short", stack: str = "", text: str = ""
) -> dict[str, Any]:
    """A panel with curves; `stack` is Grafana's mode of stacking."""
    custom = {"fillOpacity": 30 if stack else 5, "lineWidth": 1, "showPoints": "never"}
    if stack:
        custom["stacking"] = {"mode": stack, "group": "A"}
    panel = _panel("timeseries", title, queries, unit, text)
    panel["fieldConfig"]["defaults"] |= {"custom": custom, "min": 0}
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    panel["fieldConfig"]["overrides"] = [
        {
            "matcher": {"id": "byName", "options": kind},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for kind, colour in KINDS.items()
        if any(legend == "{{kind}}" for _, legend in queries)
    ]
    return panel


def stat(
    title: str, query: Query, unit: str = "short", *, red_from: float | None = None, text: str = ""
) -> dict[str, Any]:
    """A panel with one number."""
    panel = _panel("stat", title, [query], unit, text)
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if red_from is not None:
        steps.append({"color": "red", "value": red_from})
    panel["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": steps}
    panel["options"] = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    return panel


def _panel(kind: str, title: str, queries: Sequence[Query], unit: str, text: str) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": expr.replace("@", '{instance=~"$instance"}'),
                "legendFormat": legend,
            }
            for number, (expr, legend) in enumerate(queries)
        ],
    }


CACHED = 'sum(rate(kvboost_prompt_tokens_total{kind!="miss", instance=~"$instance"}[5m]))'
FAILED = 'sum(rate(kvboost_requests_total{status=~"5..", instance=~"$instance"}[5m]))'
FIRST, NEXT = "time_to_first_token_seconds", "inter_token_seconds"
PHASE = "phase_seconds"
MEAN_OF_PHASES = (
    f"{rate(f'{PHASE}_sum', '{{phase}}')[0]} / {rate(f'{PHASE}_count', '{{phase}}')[0]}"
)
FILL = "sum by (tier)(kvboost_tier_bytes@) / sum by (tier)(kvboost_tier_bytes_limit@ > 0)"

GLANCE = [
    stat("Requests", rate("requests_total"), "reqps"),
    stat("First token, p95", quantile(0.95, FIRST, "p95"), "s"),
    stat("Next token, p95", quantile(0.95, NEXT, "p95"), "s"),
    stat(
        "Prompt tokens from the store",
        (f"{CACHED} / sum(rate(kvboost_prompt_tokens_total@[5m]))", ""),
        "percentunit",
        text="Exact and moved, of all prompt tokens of five minutes.",
    ),
    stat(
        "Server errors",
        (f"({FAILED} or vector(0)) / sum(rate(kvboost_requests_total@[5m]))", ""),
        "percentunit",
        red_from=0.01,
        text="Answers with a status of 500 or more, of all requests of five minutes.",
    ),
    stat(
        "Tiers down",
        ("sum(1 - kvboost_tier_up@)", ""),
        red_from=1,
        text="The server goes on without a tier that is down: what was in it is a miss.",
    ),
]

ROWS: dict[str, list[dict[str, Any]]] = {
    "Traffic": [
        series("Requests", rate("requests_total", "{{endpoint}} {{status}}"), unit="reqps"),
        series("How requests ended", rate("finished_total", "{{reason}}"), unit="reqps"),
        series(
            "Tokens",
            rate("generated_tokens_total", "generated"),
            rate("prompt_tokens_total", "prompt"),
            rate("warmed_tokens_total", "warmed"),
            rate("promoted_tokens_total", "promoted"),
        ),
        series(
            "Running and waiting",
            gauge("running_requests", "running"),
            gauge("running_requests_limit", "running, limit"),
            gauge("waiting_requests", "waiting"),
            gauge("waiting_requests_limit", "waiting, limit"),
        ),
        series(
            "Batch",
            ("avg(kvboost_mean_batch_size@)", "requests in a step, since the start"),
            rate("steps_total", "steps per second"),
            rate("preemptions_total", "preemptions per second"),
        ),
        series(
            "K/V of the batch",
            gauge("working_kv_tokens", "tokens"),
            gauge("working_kv_tokens_limit", "tokens, limit"),
        ),
    ],
    "Latency": [
        series("First token", *quantiles(FIRST), unit="s"),
        series("Next token", *quantiles(NEXT), unit="s"),
        series(
            "Whole requests, p95",
            quantile(0.95, "request_seconds", "{{endpoint}}", by="endpoint"),
            unit="s",
        ),
        series(
            "Where the time goes",
            (MEAN_OF_PHASES, "{{phase}}"),
            unit="s",
            stack="normal",
            text="Mean of an answer; repair is part of prefill.",
        ),
        series("Queue, p95", quantile(0.95, PHASE, "queue", only='phase="queue"'), unit="s"),
    ],
    "Reuse": [
        series(
            "Prompt tokens",
            rate("prompt_tokens_total", "{{kind}}"),
            stack="percent",
            text="Exact: same text before it. Moved: other text before it. Miss: computed.",
        ),
        series(
            "Moved tokens, and those computed again",
            rate("prompt_tokens_total", "moved", only='kind="moved"'),
            rate("repaired_tokens_total", "repaired"),
        ),
        series("Chunks looked for", rate("chunks_total", "{{kind}}"), stack="normal"),
        series("Audits", rate("audits_total", "audits per second")),
        series(
            "Quality of moved text",
            ("max(kvboost_audit_kl@)", "mean KL, worst tenant"),
            text="Compare with the option quality_budget.",
        ),
        stat(
            "Tenants without moved text",
            gauge("tenants_without_moved_text"),
            red_from=1,
            text="Audits were over the budget, so only exact text is reused for them.",
        ),
    ],
    "Store": [
        series("Bytes", ("sum by (tier)(kvboost_tier_bytes@)", "{{tier}}"), unit="bytes"),
        series("Fill", (FILL, "{{tier}}"), unit="percentunit"),
        series(
            "Chunks",
            ("sum by (tier)(kvboost_tier_chunks@)", "{{tier}}"),
            gauge("pinned_chunks", "pinned"),
        ),
        series(
            "Chunks come and go",
            rate("stored_chunks_total", "stored"),
            rate("evicted_chunks_total", "evicted"),
            rate("loaded_chunks_total", "loaded from below"),
            rate("tier_written_chunks_total", "written to {{tier}}"),
        ),
        series(
            "Found below memory",
            rate("tier_hits_total", "{{tier}} found"),
            rate("tier_misses_total", "{{tier}} not found"),
        ),
        series(
            "Faults",
            rate("tier_faults_total", "{{tier}} faults"),
            rate("tier_dropped_writes_total", "{{tier}} not written"),
            rate("damaged_frames_total", "damaged frames"),
            rate("foreign_frames_total", "frames of others"),
            text="No request fails because of these; they become misses.",
        ),
        series(
            "Memory of the process",
            ("sum(process_resident_memory_bytes@)", "resident"),
            ('sum(kvboost_tier_bytes{tier="memory", instance=~"$instance"})', "store"),
            gauge("working_kv_bytes", "K/V of the batch"),
            gauge("index_bytes", "index"),
            unit="bytes",
        ),
    ],
    "Inside vLLM": [
        series("Requests that were looked up", of_vllm("kvboost_requests", ""), unit="reqps"),
        series(
            "Prompt tokens",
            of_vllm("prompt_tokens", "all"),
            of_vllm("prefix_cache_hits", "vLLM's own prefix cache"),
            of_vllm("kvboost_exact_tokens", "connector, exact"),
            of_vllm("kvboost_moved_tokens", "connector, moved"),
            of_vllm("kvboost_repaired_tokens", "of it computed again"),
            of_vllm("kvboost_promoted_tokens", "made exact in idle time"),
            text="What is left of all was computed.",
        ),
        series("Audits", of_vllm("kvboost_audits", "audits per second")),
        series(
            "Chunks come and go",
            of_vllm("kvboost_stored_chunks", "stored"),
            of_vllm("kvboost_evicted_chunks", "evicted"),
            of_vllm("kvboost_loaded_chunks", "loaded from below"),
        ),
        series(
            "Faults",
            of_vllm("kvboost_tier_faults", "faults of tiers"),
            of_vllm("kvboost_dropped_writes", "chunks not stored"),
            of_vllm("kvboost_damaged_frames", "damaged frames"),
            of_vllm("kvboost_foreign_frames", "frames of others"),
            text="`kvboost doctor --vllm URL` says what they mean.",
        ),
    ],
    "Tenants and adapters": [
        series("Requests", rate("tenant_requests_total", "{{tenant}}", most=10), unit="reqps"),
        series("Tokens generated", rate("tenant_generated_tokens_total", "{{tenant}}", most=10)),
        series(
            "Prompt tokens computed",
            rate("tenant_prompt_tokens_total", "{{tenant}}", only='kind="miss"', most=10),
        ),
        series(
            "Memory",
            ("topk(10, sum by (tenant)(kvboost_tenant_memory_bytes@))", "{{tenant}}"),
            unit="bytes",
        ),
        series(
            "Prompt tokens by adapter",
            rate("adapter_prompt_tokens_total", "{{adapter}} {{kind}}"),
            text="Without a name: the base model.",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    panels = _in_lines(GLANCE, 0, COLUMNS // len(GLANCE), 4)
    for title, row in ROWS.items():
        head = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels += _in_lines([head], _end(panels), COLUMNS, 1)
        panels += _in_lines(row, _end(panels), COLUMNS // 3, HEIGHT)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "KVBoost",
        "uid": "kvboost",
        "tags": ["kvboost", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _in_lines(
    panels: list[dict[str, Any]], y: int, width: int, height: int
) -> list[dict[str, Any]]:
    """Panels of one size with their places in the grid, from left to right, then the next line."""
    in_line = COLUMNS // width
    places = [(width * (n % in_line), y + height * (n // in_line)) for n in range(len(panels))]
    return [
        {**panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}}
        for panel, (x, y) in zip(panels, places, strict=True)
    ]


def _end(panels: list[dict[str, Any]]) -> int:
    """The first line of the grid below all panels."""
    last: dict[str, int] = panels[-1]["gridPos"]
    return last["y"] + last["h"]


def _variables() -> list[dict[str, Any]]:
    query = "label_values(kvboost_info, instance)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Server",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": "instance"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


if __name__ == "__main__":
    DASHBOARD.parent.mkdir(exist_ok=True)
    DASHBOARD.write_text(json.dumps(dashboard(), indent=2) + "\n")
