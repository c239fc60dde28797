"""A report for people and programs: a table, a page, Prometheus text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvboost.bench.report.page import document
from kvboost.bench.report.section import Part, Section, Table
from kvboost.probe.findings import ORDER, Finding, Report

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLES = {
    "right": "Are answers from the cache right?",
    "fast": "Is the cache fast?",
    "separate": "Are clients separate?",
    "gain": "What is lost, and what could be gained?",
}
VERDICTS = {
    "red": "Something is wrong: see the red lines.",
    "yellow": "Nothing is wrong; the yellow lines are worth knowing.",
    "green": "Right, fast and separate, as far as this probe can see.",
    "grey": "Nothing wrong was seen, but not everything could be checked: see the grey lines.",
}
COLOURS = {"red": "bold red", "yellow": "yellow", "green": "green", "grey": "bright_black"}
LEVELS = {"green": 0, "grey": 1, "yellow": 2, "red": 3}
GUIDE = "What each line means, and which flag of your engine fixes it: docs/guides/probe.md"


def as_table(report: Report) -> RenderableType:
    """For a terminal."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table as Grid  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = Grid(box=None, padding=(0, 2, 0, 0), show_header=False)
    for column in ("light", "area", "name"):
        grid.add_column(column, no_wrap=True)
    grid.add_column("sentence", overflow="fold")
    for each in report.findings:
        style = COLOURS[each.light]
        grid.add_row(Text(f"● {each.light}", style), each.area, each.name, Text(each.sentence))
    head = Text.assemble((report.model, "bold"), f" at {report.url}: {_cost(report)}")
    verdict = Text(VERDICTS[report.light], COLOURS[report.light])
    return Group(head, Text(), grid, Text(), verdict, Text(GUIDE, "bright_black"))


def as_page(report: Report) -> str:
    """One HTML page that needs no other file."""
    facts = [report.url, _cost(report)]
    areas = [area for area in TITLES if any(f.area == area for f in report.findings)]
    sections = [_section(area, [f for f in report.findings if f.area == area]) for area in areas]
    return document(f"KVBoost probe: {report.model}", facts, sections)


def as_metrics(report: Report, at_s: float) -> str:
    """Prometheus text, for the textfile collector of a node exporter."""
    lines = [
        "# HELP kvboost_probe_level Worst light of a finding: 0 green, 1 grey, 2 yellow, 3 red.",
        "# TYPE kvboost_probe_level gauge",
    ]
    for each in report.findings:
        labels = f'model="{_quoted(report.model)}",area="{each.area}",finding="{each.name}"'
        lines.append(f"kvboost_probe_level{{{labels}}} {LEVELS[each.light]}")
    lines += _gauges(
        ("ok", "Whether nothing is red.", int(report.ok)),
        ("requests", "Requests of the last probe.", report.num_requests),
        ("seconds", "Duration of the last probe.", report.seconds),
        ("time_seconds", "When the last probe ended.", round(at_s)),
    )
    return "\n".join(lines) + "\n"


def as_failure(at_s: float) -> str:
    """Prometheus text of a probe that could not be run."""
    ended = ("time_seconds", "When the last probe ended.", round(at_s))
    return "\n".join(_gauges(("ok", "Whether nothing is red.", 0), ended)) + "\n"


def _gauges(*each: tuple[str, str, float]) -> list[str]:
    return [
        line
        for name, text, value in each
        for line in (
            f"# HELP kvboost_probe_{name} {text}",
            f"# TYPE kvboost_probe_{name} gauge",
            f"kvboost_probe_{name} {value}",
        )
    ]


def _cost(report: Report) -> str:
    return (
        f"{report.num_requests} requests, about {report.num_tokens:,} tokens, "
        f"{report.seconds:.0f} s"
    )


def _section(area: str, findings: list[Finding]) -> Section:
    worst = next(light for light in ORDER if any(f.light == light for f in findings))
    rows = [(f.light, f.name, f.sentence) for f in findings]
    figures = [
        (f.name, ", ".join(f"{name} {value}" for name, value in f.figures.items()))
        for f in findings
        if f.figures
    ]
    parts = [Part(table=Table(("light", "finding", "what was seen"), rows, marked=("red",)))]
    if figures:
        parts.append(Part(table=Table(("finding", "figures"), figures, fold="Figures")))
    takeaway = next(f.sentence for f in findings if f.light == worst)
    return Section(area, TITLES[area], takeaway, parts)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
