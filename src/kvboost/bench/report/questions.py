"""Sections on when reuse helps and what it costs in quality: frontier, length, share."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.bench.report import plots
from kvboost.bench.report.compared import quality
from kvboost.bench.report.fields import TOP1, drop_empty, table, values
from kvboost.bench.report.formats import joined, percent, spread, times
from kvboost.bench.report.names import AGAIN, BASELINE, PHASES, POOLED, family, place
from kvboost.bench.report.reading import Results
from kvboost.bench.report.section import Part, Picture, Section
from kvboost.config import Options

_Rows = Sequence[Mapping[str, Any]]
_REPAIRS = (
    "A repair recomputes a share of the moved tokens: none recomputes no token, heads only the"
    " first tokens of each document. A full prefill is our own with reuse off. KL is the divergence"
    " of the output probabilities from a full prefill's, in nats; top-1 is how often both choose"
    " the same token, over 16 tokens of each prompt. This is one workload of independent documents"
    " with few prompts; docs/concepts/exact-and-moved.md has more prompts, models and tasks."
)
_TOKENS = plots.Scale("prompt tokens", is_log=True)


def frontier(results: Results) -> Section | None:
    """Return the section on quality against speed."""
    rows = drop_empty(results.asked("frontier"), "ratio", "top1")
    systems = _system_pictures(results)
    if not rows and not systems:
        return None
    parts = [Part(title="Systems", pictures=systems)] if systems else []
    if rows:
        parts.append(
            Part(
                title="Repair of moved documents",
                pictures=_frontier_pictures(rows),
                table=table(rows, "repair", "computed_share", "ttft_ms", "full_ms", "ratio"),
            )
        )
    return Section(
        "frontier",
        "Quality against speed",
        _frontier_takeaway(rows),
        tuple(parts),
        _REPAIRS if rows else "",
        "Up and to the left is better: faster at the same quality.",
    )


def _system_pictures(results: Results) -> tuple[Picture, ...]:
    x = plots.Scale("first token, generate() = 1", is_log=True, mark=1.0)
    systems = [s for s in results.measured if s != AGAIN]
    keys = [(f"{number} {name}", family(name)) for number, name in enumerate(systems, 1)]
    made = []
    for phase in results.phases(POOLED):
        points = []
        for number, system in enumerate(systems, 1):
            line = results.find(POOLED, phase, "ttft", system)
            top1 = quality(results, POOLED, phase, system)
            if top1 is not None and (line is not None or system == BASELINE):
                ratio = line.ratio if line else 1.0
                points.append(plots.Point(str(number), family(system), ratio, 100 * top1))
        if points:
            title = f"{phase}: top-1 by time to the first token"
            drawn = plots.points(points, x, plots.Scale("top-1, %"), title, keys=keys)
            made.append(Picture(title, drawn))
    return tuple(made)


def _frontier_pictures(rows: _Rows) -> tuple[Picture, ...]:
    x = plots.Scale("first token, full prefill = 1")
    ordered = sorted(rows, key=lambda row: row["ratio"])
    made = []
    for name, y, factor in (
        ("top1", plots.Scale("top-1, %"), 100),
        ("kl", plots.Scale("KL, nats", is_log=True), 1),
    ):
        known = drop_empty(ordered, name)
        # A distance of nothing (everything computed again) has no place on a log scale.
        known = [row for row in known if row[name] > 0 or not y.is_log]
        points = [
            plots.Point(str(row["repair"]), "ours", row["ratio"], factor * row[name])
            for row in known
        ]
        if points:
            title = f"{'Same token' if name == 'top1' else 'Distance'} by repair"
            drawn = plots.points(points, x, y, title, is_joined=True)
            made.append(Picture(title, drawn))
    return tuple(made)


def _frontier_takeaway(rows: _Rows) -> str:
    if not rows:
        return "Top-1 and time: the figures of all workloads together."
    usual = str(Options().recompute_ratio)
    fast = min(rows, key=lambda row: row["ratio"])
    chosen = [row for row in rows if row["repair"] == usual and row is not fast]
    named = [(f"the default repair {usual}", row) for row in chosen]
    said = [
        f"{name} takes {times(row['ratio'])} of a full prefill's time and agrees with it on"
        f" {percent(row['top1'])} of tokens"
        for name, row in [*named, (f"repair {fast['repair']}, the fastest,", fast)]
    ]
    return f"On moved documents {'; '.join(said)}."


def length(results: Results) -> Section | None:
    """Return the section on prompt length."""
    rows = drop_empty(results.asked("length"), "tokens", "ours_ms", "bare_ms", "ratio")
    if not rows:
        return None
    pictures, said = [], []
    for phase in _phases(rows):
        own = _of(rows, phase)
        series = [
            plots.Line(name, css, tuple((row["tokens"], row[field]) for row in own))
            for name, css, field in (
                ("kvboost", "ours", "ours_ms"),
                ("generate()", "transformers", "bare_ms"),
            )
        ]
        cost = f"new text takes {spread([row['ratio'] for row in own])} of generate()'s time"
        said.append(cost if phase == "cold" else f"{phase} {_helps(own, 'tokens')}")
        y = plots.Scale("first token, ms", is_log=True)
        pictures.append(Picture(phase, plots.lines(series, _TOKENS, y, f"{phase} by length")))
    figures = table(rows, "phase", "tokens", "ours_ms", "bare_ms", "ratio", fold="All figures")
    return Section(
        "length",
        "By prompt length",
        f"To the first token {'; '.join(said)}.",
        (Part(pictures=tuple(pictures), table=figures),),
        TOP1,
        "Reuse pays from where the lines cross.",
    )


def share(results: Results) -> Section | None:
    """Return the section on the share of a prompt that is reused."""
    rows = drop_empty(results.asked("share"), "tokens", "share", "ratio")
    if not rows:
        return None
    lengths = values(rows, "tokens")
    pictures, said = [], []
    for phase in _phases(rows):
        series = []
        for number, tokens in enumerate(lengths):
            own = [row for row in _of(rows, phase) if row["tokens"] == tokens]
            if own:
                points = tuple((100 * row["share"], row["ratio"]) for row in own)
                series.append(plots.Line(_tokens(tokens), f"shade{number % 4}", points))
                said.append(f"{phase} at {_tokens(tokens)} {_helps(own, 'share')}")
        x, y = plots.Scale("share reused, %"), plots.Scale("time, generate() = 1", mark=1.0)
        pictures.append(Picture(phase, plots.lines(series, x, y, f"{phase} by share")))
    figures = table(
        rows, "phase", "tokens", "share", "ours_ms", "bare_ms", "ratio", fold="All figures"
    )
    return Section(
        "share",
        "By share of the prompt that is reused",
        f"To the first token {'; '.join(said)}.",
        (Part(pictures=tuple(pictures), table=figures),),
        TOP1,
        "The strong line is break-even: below it, reuse is faster than generate(). To the left of"
        " the crossing, lookup and loading cost more than they save.",
    )


def _helps(rows: _Rows, name: str) -> str:
    """Say where reuse is faster: from its last crossing on, an earlier one was luck."""
    ordered = sorted(rows, key=lambda row: float(row[name]))
    is_share = name == "share"
    said = [f"{100 * r[name]:.3g}%" if is_share else f"{r[name]:,.0f}" for r in ordered]
    what, unit = ("share", "") if is_share else ("length", " tokens")
    ends = f"{' to '.join(dict.fromkeys((said[0], said[-1])))}{unit}"
    slower = [n for n, row in enumerate(ordered) if row["ratio"] >= 1.0]
    if not slower:
        return f"is faster than generate() at every {what} measured ({ends})"
    if len(slower) == len(said):
        return f"is not faster than generate() at any {what} measured ({ends})"
    if slower[-1] == len(said) - 1:
        faster = joined([each for n, each in enumerate(said) if n not in slower])
        return f"is not reliably faster than generate(): only at {faster}{unit}"
    return f"is faster than generate() from {said[slower[-1] + 1]}{unit} on"


def _tokens(value: float) -> str:
    return f"{value:,.0f} tokens"


def _phases(rows: _Rows) -> list[str]:
    return sorted({str(row["phase"]) for row in rows}, key=lambda name: place(name, PHASES))


def _of(rows: _Rows, phase: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["phase"] == phase]
