"""The Grafana dashboard: what Grafana needs to import it, and metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import make_dashboard
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
    names = set(re.findall(r"\b(?:kvboost|process)_\w+", expression))
    assert names and names <= SERIES.keys()
    by = {
        label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")
    }
    known = set().union(*(SERIES[name] for name in names))
    selected = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
    assert by | selected <= known | {"le", "instance"}
    for name, selector in re.findall(r"\b(kvboost_\w+)(\{[^}]*\})?", expression):
        assert 'instance=~"$instance"' in selector, name


def test_every_metric_is_on_the_board() -> None:
    shown = " ".join(EXPRESSIONS) + str(BOARD["templating"])
    assert [metric.name for metric in METRICS if metric.name not in shown] == []
