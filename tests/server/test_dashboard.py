"""The Grafana dashboard: what Grafana needs to import it, and metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import make_dashboard
from kvboost.connectors.vllm.counted import COUNTED, PREFIX
from kvboost.server.metrics import METRICS

BOARD: dict[str, Any] = json.loads(make_dashboard.DASHBOARD.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SERIES = {
    name: set(metric.labels)
    for metric in METRICS
    for name in (
        [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
        if metric.kind == "histogram"
        else [metric.name]
    )
} | {"process_resident_memory_bytes": set()}
SERIES |= {f"{PREFIX}{name}_total": set() for name in COUNTED}
SERIES |= {f"vllm:{name}_total": set() for name in ("prompt_tokens", "prefix_cache_hits")}


def test_the_file_is_what_the_script_writes() -> None:
    assert make_dashboard.dashboard() == BOARD


def test_grafana_finds_what_it_needs_to_import_it() -> None:
    assert BOARD["schemaVersion"] >= 36 and BOARD["uid"] == "kvboost" and BOARD["title"]
    assert "id" not in BOARD  # Grafana gives its own
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["title"]
        assert panel["targets"] and all(target["refId"] for target in panel["targets"])


def test_panels_lie_in_the_grid_and_not_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        columns, lines = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = {(x, y) for x in columns for y in lines}
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_use_metrics_and_labels_that_exist(expression: str) -> None:
    names = set(re.findall(r"(?<![\w:])(?:kvboost_|process_|vllm:)\w+", expression))
    assert names and names <= SERIES.keys()
    by = {
        label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")
    }
    known = set().union(*(SERIES[name] for name in names))
    selected = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
    assert by | selected <= known | {"le", "instance"}
    for name, selector in re.findall(r"\b((?:kvboost_|vllm:)\w+)(\{[^}]*\})?", expression):
        assert 'instance=~"$instance"' in selector, name


def test_every_metric_is_on_the_board() -> None:
    shown = " ".join(EXPRESSIONS) + str(BOARD["templating"])
    assert [metric.name for metric in METRICS if metric.name not in shown] == []
    counters = [f"{PREFIX}{name}_total" for name in COUNTED if name != "prompt_tokens"]
    assert [name for name in counters if name not in shown] == []


def test_all_of_it_is_known_to_the_models_of_grafana() -> None:
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(BOARD)
    assert lost(BOARD, json.loads(encoder.JSONEncoder().encode(read))) == []


def lost(whole: Any, part: Any, place: str = "") -> list[str]:
    """Where `part` is not what `whole` is; what it has in addition does not matter."""
    if isinstance(whole, dict):
        missing = [f"{place}/{key}" for key in whole if key not in part]
        both = ((key, whole[key], part[key]) for key in whole if key in part)
        return missing + [each for key, *pair in both for each in lost(*pair, f"{place}/{key}")]
    if isinstance(whole, list) and len(whole) == len(part):
        pairs = zip(whole, part, strict=True)
        return [each for n, pair in enumerate(pairs) for each in lost(*pair, f"{place}/{n}")]
    return [] if whole == part else [place]
