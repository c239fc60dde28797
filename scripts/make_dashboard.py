"""Write the Grafana dashboard: rows of panels, each a few PromQL expressions over our metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "docs" / "grafana" / "kvboost.json"
COLUMNS = 24  # of Grafana's grid
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
KINDS = {"exact": "green", "moved": "yellow", "miss": "#808080"}

Query = tuple[str, str]
"""PromQL and the legend of its series. `@` stands for the selector of the chosen instances."""


def per_second(metric: str, *by: str) -> str:
    """How fast a counter grows, by labels."""
    total = f"sum by ({', '.join(by)})" if by else "sum"
    return f"{total}(rate({metric}@[$__rate_interval]))"


def quantiles(metric: str, *shares: float) -> list[Query]:
    """Quantiles of a histogram."""
    buckets = f"sum by (le)(rate({metric}_bucket@[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}") for share in shares]


def series(
    title: str, queries: list[Query], unit: str = "short", *, stack: str = "", text: str = ""
) -> dict[str, Any]:
    """A panel with curves; `stack` is Grafana's mode of stacking."""
    custom = {"fillOpacity": 30 if stack else 5, "lineWidth": 1, "showPoints": "never"}
    if stack:
        custom["stacking"] = {"mode": stack, "group": "A"}
    panel = _panel("timeseries", title, queries, unit, text)
    panel["fieldConfig"]["defaults"]["custom"] = custom
    panel["fieldConfig"]["defaults"]["min"] = 0
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


def _panel(
    kind: str, title: str, queries: list[Query], unit: str, text: str = ""
) -> dict[str, Any]:
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
FIRST, NEXT = "kvboost_time_to_first_token_seconds", "kvboost_inter_token_seconds"

GLANCE = [
    stat("Requests", (per_second("kvboost_requests_total"), ""), "reqps"),
    stat("First token, p95", quantiles(FIRST, 0.95)[0], "s"),
    stat("Next token, p95", quantiles(NEXT, 0.95)[0], "s"),
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
        series(
            "Requests",
            [
                (
                    per_second("kvboost_requests_total", "endpoint", "status"),
                    "{{endpoint}} {{status}}",
                )
            ],
            "reqps",
        ),
        series(
            "How requests ended",
            [(per_second("kvboost_finished_total", "reason"), "{{reason}}")],
            "reqps",
        ),
        series(
            "Tokens",
            [
                (per_second("kvboost_generated_tokens_total"), "generated"),
                (per_second("kvboost_prompt_tokens_total"), "prompt"),
                (per_second("kvboost_warmed_tokens_total"), "warmed"),
                (per_second("kvboost_promoted_tokens_total"), "promoted"),
            ],
        ),
        series(
            "Running and waiting",
            [
                ("sum(kvboost_running_requests@)", "running"),
                ("sum(kvboost_running_requests_limit@)", "running, limit"),
                ("sum(kvboost_waiting_requests@)", "waiting"),
                ("sum(kvboost_waiting_requests_limit@)", "waiting, limit"),
            ],
        ),
        series(
            "Batch",
            [
                ("avg(kvboost_mean_batch_size@)", "requests in a step, since the start"),
                (per_second("kvboost_steps_total"), "steps per second"),
                (per_second("kvboost_preemptions_total"), "preemptions per second"),
            ],
        ),
        series(
            "K/V of the batch",
            [
                ("sum(kvboost_working_kv_tokens@)", "tokens"),
                ("sum(kvboost_working_kv_tokens_limit@)", "tokens, limit"),
            ],
        ),
    ],
    "Latency": [
        series("First token", quantiles(FIRST, 0.5, 0.95, 0.99), "s"),
        series("Next token", quantiles(NEXT, 0.5, 0.95, 0.99), "s"),
        series(
            "Whole requests, p95",
            [
                (
                    "histogram_quantile(0.95, sum by (le, endpoint)"
                    "(rate(kvboost_request_seconds_bucket@[$__rate_interval])))",
                    "{{endpoint}}",
                )
            ],
            "s",
        ),
        series(
            "Where the time goes",
            [
                (
                    f"{per_second('kvboost_phase_seconds_sum', 'phase')} / "
                    f"{per_second('kvboost_phase_seconds_count', 'phase')}",
                    "{{phase}}",
                )
            ],
            "s",
            stack="normal",
            text="Mean of an answer; repair is part of prefill.",
        ),
        series(
            "Queue, p95",
            [
                (
                    "histogram_quantile(0.95, sum by (le)(rate(kvboost_phase_seconds_bucket"
                    '{phase="queue", instance=~"$instance"}[$__rate_interval])))',
                    "queue",
                )
            ],
            "s",
        ),
    ],
    "Reuse": [
        series(
            "Prompt tokens",
            [(per_second("kvboost_prompt_tokens_total", "kind"), "{{kind}}")],
            stack="percent",
            text="Exact: same text before it. Moved: other text before it. Miss: computed.",
        ),
        series(
            "Moved tokens, and those computed again",
            [
                (
                    'sum(rate(kvboost_prompt_tokens_total{kind="moved", instance=~"$instance"}'
                    "[$__rate_interval]))",
                    "moved",
                ),
                (per_second("kvboost_repaired_tokens_total"), "repaired"),
            ],
        ),
        series(
            "Chunks looked for",
            [(per_second("kvboost_chunks_total", "kind"), "{{kind}}")],
            stack="normal",
        ),
        series("Audits", [(per_second("kvboost_audits_total"), "audits per second")]),
        series(
            "Quality of moved text",
            [("max(kvboost_audit_kl@)", "mean KL, worst tenant")],
            text="Compare with the option quality_budget.",
        ),
        stat(
            "Tenants without moved text",
            ("sum(kvboost_tenants_without_moved_text@)", ""),
            red_from=1,
            text="Audits were over the budget, so only exact text is reused for them.",
        ),
    ],
    "Store": [
        series("Bytes", [("sum by (tier)(kvboost_tier_bytes@)", "{{tier}}")], "bytes"),
        series(
            "Fill",
            [
                (
                    "sum by (tier)(kvboost_tier_bytes@) / "
                    "sum by (tier)(kvboost_tier_bytes_limit@ > 0)",
                    "{{tier}}",
                )
            ],
            "percentunit",
        ),
        series(
            "Chunks",
            [
                ("sum by (tier)(kvboost_tier_chunks@)", "{{tier}}"),
                ("sum(kvboost_pinned_chunks@)", "pinned"),
            ],
        ),
        series(
            "Chunks come and go",
            [
                (per_second("kvboost_stored_chunks_total"), "stored"),
                (per_second("kvboost_evicted_chunks_total"), "evicted"),
                (per_second("kvboost_loaded_chunks_total"), "loaded from below"),
                (per_second("kvboost_tier_written_chunks_total", "tier"), "written to {{tier}}"),
            ],
        ),
        series(
            "Found below memory",
            [
                (per_second("kvboost_tier_hits_total", "tier"), "{{tier}} found"),
                (per_second("kvboost_tier_misses_total", "tier"), "{{tier}} not found"),
            ],
        ),
        series(
            "Faults",
            [
                (per_second("kvboost_tier_faults_total", "tier"), "{{tier}} faults"),
                (per_second("kvboost_tier_dropped_writes_total", "tier"), "{{tier}} not written"),
                (per_second("kvboost_damaged_frames_total"), "damaged frames"),
                (per_second("kvboost_foreign_frames_total"), "frames of others"),
            ],
            text="No request fails because of these; they become misses.",
        ),
        series(
            "Memory of the process",
            [
                ("sum(process_resident_memory_bytes@)", "resident"),
                ('sum(kvboost_tier_bytes{tier="memory", instance=~"$instance"})', "store"),
                ("sum(kvboost_working_kv_bytes@)", "K/V of the batch"),
                ("sum(kvboost_index_bytes@)", "index"),
            ],
            "bytes",
        ),
    ],
    "Tenants and adapters": [
        series(
            "Requests",
            [(f"topk(10, {per_second('kvboost_tenant_requests_total', 'tenant')})", "{{tenant}}")],
            "reqps",
        ),
        series(
            "Tokens generated",
            [
                (
                    f"topk(10, {per_second('kvboost_tenant_generated_tokens_total', 'tenant')})",
                    "{{tenant}}",
                )
            ],
        ),
        series(
            "Prompt tokens computed",
            [
                (
                    "topk(10, sum by (tenant)(rate(kvboost_tenant_prompt_tokens_total"
                    '{kind="miss", instance=~"$instance"}[$__rate_interval])))',
                    "{{tenant}}",
                )
            ],
        ),
        series(
            "Memory",
            [("topk(10, sum by (tenant)(kvboost_tenant_memory_bytes@))", "{{tenant}}")],
            "bytes",
        ),
        series(
            "Prompt tokens by adapter",
            [
                (
                    "sum by (adapter, kind)(rate(kvboost_adapter_prompt_tokens_total"
                    '{instance=~"$instance"}[$__rate_interval]))',
                    "{{adapter}} {{kind}}",
                )
            ],
            text="Without a name: the base model.",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    place = _Place()
    panels = [place.put(panel, width=COLUMNS // len(GLANCE), height=4) for panel in GLANCE]
    for title, row in ROWS.items():
        place.new_line()
        panels.append(
            place.put({"type": "row", "title": title, "collapsed": False, "panels": []}, 24, 1)
        )
        panels += [place.put(panel, width=COLUMNS // 3, height=HEIGHT) for panel in row]
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


class _Place:
    """Fills the grid from left to right, then the next line."""

    def __init__(self) -> None:
        self._x = self._y = self._height = 0

    def new_line(self) -> None:
        self._x, self._y, self._height = 0, self._y + self._height, 0

    def put(self, panel: dict[str, Any], width: int, height: int) -> dict[str, Any]:
        if self._x + width > COLUMNS:
            self.new_line()
        at = {"x": self._x, "y": self._y, "w": width, "h": height}
        self._x, self._height = self._x + width, max(self._height, height)
        return {**panel, "gridPos": at}


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
