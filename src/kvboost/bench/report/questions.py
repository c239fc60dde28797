"""Sections on when reuse helps and what it costs in quality: frontier, length, share."""

from collections.abc import Sequence

from kvboost.bench.report.compared import fastest, quality, slowest
from kvboost.bench.report.reading import (
    AGAIN,
    BASELINE,
    POOLED,
    Line,
    Results,
    by_phase,
    family,
    grouped,
    known,
)
from kvboost.bench.report.section import Part, Picture, Section, joined, percent, table, times
from kvboost.config import Options
from kvboost.drawing import plots

TOP1 = (
    "top-1 here is agreement with the same model's full prefill in the same dtype, over 4 tokens"
    " of each prompt: a sanity check, not a measure of quality."
)
_REPAIRS = (
    "A repair recomputes a share of the moved tokens: none recomputes no token, heads only the"
    " first tokens of each document. A full prefill is our own with reuse off. KL is the divergence"
    " of the output probabilities from a full prefill's, in nats; top-1 is how often both choose"
    " the same token, over 16 tokens of each prompt. This is one workload of independent documents"
    " with few prompts; docs/concepts/exact-and-moved.md has more prompts, models and tasks."
)


def frontier(results: Results) -> Section | None:
    """Return the section on quality against speed."""
    rows = results.asked("frontier", "ratio", "top1")
    systems = _system_pictures(results)
    if not rows and not systems:
        return None
    parts = [Part(title="Systems", pictures=systems)] if systems else []
    if rows:
        figures = table(rows, "repair", "computed_share", "ttft_ms", "full_ms", "ratio")
        drawn = _repair_pictures(rows)
        parts.append(Part(title="Repair of moved documents", pictures=drawn, table=figures))
    return Section(
        "frontier",
        "Quality against speed",
        _frontier_takeaway(rows),
        parts,
        _REPAIRS if rows else "",
        "Up and to the left is better: faster at the same quality.",
    )


def _system_pictures(results: Results) -> list[Picture]:
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
                ratio = line["ratio"] if line else 1.0
                points.append(plots.Point(str(number), family(system), ratio, 100 * top1))
        if points:
            title = f"{phase}: top-1 by time to the first token"
            drawn = plots.points(points, x, plots.Scale("top-1, %"), title, keys=keys)
            made.append(Picture(title, drawn))
    return made


def _repair_pictures(rows: Sequence[Line]) -> list[Picture]:
    x = plots.Scale("first token, full prefill = 1")
    ordered = sorted(rows, key=lambda row: float(row["ratio"]))
    # A distance of nothing (everything computed again) has no place on a log scale.
    apart = [row for row in known(ordered, "kl") if row["kl"] > 0]
    made = []
    for title, shown, y, name, factor in (
        ("Same token by repair", ordered, plots.Scale("top-1, %"), "top1", 100),
        ("Distance by repair", apart, plots.Scale("KL, nats", is_log=True), "kl", 1),
    ):
        points = [plots.Point(r["repair"], "ours", r["ratio"], factor * r[name]) for r in shown]
        if points:
            drawn = plots.points(points, x, y, title, is_joined=True)
            made.append(Picture(title, drawn))
    return made


def _frontier_takeaway(rows: Sequence[Line]) -> str:
    if not rows:
        return "Top-1 and time: the figures of all workloads together."
    usual, fast = str(Options().recompute_ratio), fastest(rows)
    named = [
        (f"the default repair {usual}", row)
        for row in rows
        if row["repair"] == usual and row is not fast
    ]
    said = [
        f"{name} takes {times(row['ratio'])} of a full prefill's time and agrees with it on"
        f" {percent(row['top1'])} of tokens"
        for name, row in [*named, (f"repair {fast['repair']}, the fastest,", fast)]
    ]
    return f"On moved documents {'; '.join(said)}."


def length(results: Results) -> Section | None:
    """Return the section on prompt length."""
    rows = results.asked("length", "tokens", "ours_ms", "bare_ms", "ratio")
    if not rows:
        return None
    x = plots.Scale("prompt tokens", is_log=True)
    y = plots.Scale("first token, ms", is_log=True)
    pictures, said = [], []
    for phase, own in grouped(rows, "phase", by_phase).items():
        series = [
            plots.Line(name, css, tuple((row["tokens"], row[field]) for row in own))
            for name, css, field in (
                ("kvboost", "ours", "ours_ms"),
                ("generate()", "transformers", "bare_ms"),
            )
        ]
        ends = dict.fromkeys(times(row["ratio"]) for row in (fastest(own), slowest(own)))
        cost = f"new text takes {' to '.join(ends)} of generate()'s time"
        said.append(cost if phase == "cold" else f"{phase} {_helps(own, 'tokens')}")
        pictures.append(Picture(phase, plots.lines(series, x, y, f"{phase} by length")))
    figures = table(rows, "phase", "tokens", "ours_ms", "bare_ms", "ratio", fold="All figures")
    return Section(
        "length",
        "By prompt length",
        f"To the first token {'; '.join(said)}.",
        [Part(pictures=pictures, table=figures)],
        TOP1,
        "Reuse pays from where the lines cross.",
    )


def share(results: Results) -> Section | None:
    """Return the section on the share of a prompt that is reused."""
    rows = results.asked("share", "tokens", "share", "ratio")
    if not rows:
        return None
    x, y = plots.Scale("share reused, %"), plots.Scale("time, generate() = 1", mark=1.0)
    shades = {tokens: f"shade{n % 4}" for n, tokens in enumerate(grouped(rows, "tokens"))}
    pictures, said = [], []
    for phase, of_phase in grouped(rows, "phase", by_phase).items():
        series = []
        for tokens, own in grouped(of_phase, "tokens").items():
            name = f"{tokens:,.0f} tokens"
            points = tuple((100 * row["share"], row["ratio"]) for row in own)
            series.append(plots.Line(name, shades[tokens], points))
            said.append(f"{phase} at {name} {_helps(own, 'share')}")
        pictures.append(Picture(phase, plots.lines(series, x, y, f"{phase} by share")))
    figures = table(
        rows, "phase", "tokens", "share", "ours_ms", "bare_ms", "ratio", fold="All figures"
    )
    return Section(
        "share",
        "By share of the prompt that is reused",
        f"To the first token {'; '.join(said)}.",
        [Part(pictures=pictures, table=figures)],
        TOP1,
        "The strong line is break-even: below it, reuse is faster than generate(). To the left of"
        " the crossing, lookup and loading cost more than they save.",
    )


def _helps(rows: Sequence[Line], name: str) -> str:
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
