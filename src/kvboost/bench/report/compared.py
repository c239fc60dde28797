"""Sections that set systems beside each other: all workloads pooled, and one by one."""

from collections.abc import Iterable, Sequence

from kvboost.bench.report.reading import (
    AGAIN,
    BASELINE,
    COMPARED_WITH_ALL,
    MAIN,
    METRICS,
    OURS,
    PHASES,
    POOLED,
    Line,
    Results,
    family,
)
from kvboost.bench.report.section import (
    NONE,
    Part,
    Picture,
    Section,
    Table,
    joined,
    ms,
    percent,
    times,
    with_interval,
)
from kvboost.drawing import plots

RATIO = plots.Scale("time, generate() = 1, left is faster", is_log=True, mark=1.0)
_RATIO_SAID = (
    "A ratio is the median over pairs of the same prompt and round, not the quotient of the two"
    " medians."
)


def time_cell(results: Results, workload: str, phase: str, metric: str, system: str) -> str:
    """Write the time of a system in ms and, in brackets, its ratio to the baseline's."""
    if system == BASELINE:
        bare = results.bare(workload, phase, metric)
        return NONE if bare is None else f"{ms(bare['baseline_ms'])} (1.00)"
    line = results.find(workload, phase, metric, system)
    return NONE if line is None else f"{ms(line['system_ms'])} ({times(line['ratio'])})"


def quality(
    results: Results, workload: str, phase: str, system: str, name: str = "top1"
) -> float | None:
    """Return the share of a system's tokens that the fp32 model would have chosen, or its score."""
    if system == BASELINE:
        line, name = results.bare(workload, phase, "ttft"), f"baseline_{name}"
    else:
        line = results.find(workload, phase, "ttft", system)
    return line[name] if line else None


def fastest(rows: Iterable[Line]) -> Line:
    """Return the row with the least ratio."""
    return min(rows, key=lambda row: float(row["ratio"]))


def slowest(rows: Iterable[Line]) -> Line:
    """Return the row with the greatest ratio."""
    return max(rows, key=lambda row: float(row["ratio"]))


def ratio_bar(label: str, css: str, row: Line) -> plots.Bar:
    """Return the bar of a ratio, with its interval if there is one."""
    ratio = row["ratio"]
    return plots.Bar(label, css, ratio, row.get("low"), row.get("high"), times(ratio))


def _pictures(results: Results, workload: str, metric: str) -> list[Picture]:
    """Draw every system against the baseline: a drawing for each phase, all on one scale."""
    bars = {}
    for phase in results.phases(workload):
        found = [(s, results.find(workload, phase, metric, s)) for s in results.measured]
        bars[phase] = [ratio_bar(s, family(s), m) for s, m in found if m is not None]
    over = [value for rows in bars.values() for bar in rows for value in bar.ends]
    made = []
    for phase, rows in bars.items():
        title = f"{phase}: {METRICS[metric]}"
        if rows:
            made.append(Picture(title, plots.bars(rows, RATIO, f"{workload}, {title}", over)))
    return made


def headline(results: Results) -> Section | None:
    """Return the section with all workloads pooled."""
    phases = results.phases(POOLED)
    if not phases:
        return None
    has_score = any(m["score"] is not None for m in results.measures if m["workload"] == POOLED)
    qualities = {"top1": "top-1"} | ({"score": "right facts"} if has_score else {})
    columns = [f"{p}: {until}, ms" for until in METRICS.values() for p in phases]
    columns += [f"{p}: {title}" for title in qualities.values() for p in phases]
    rows = []
    for system in results.measured:
        cells = [time_cell(results, POOLED, p, m, system) for m in METRICS for p in phases]
        cells += [
            percent(quality(results, POOLED, p, system, name)) for name in qualities for p in phases
        ]
        lines = [results.find(POOLED, p, "ttft", system) for p in phases]
        pairs = " / ".join(str(m["pairs"]) if m else NONE for m in lines)
        rows.append((system, *cells, pairs))
    text = "In brackets: the ratio to the time of Transformers' generate() for the same prompts. "
    table = Table(("system", *columns, f"pairs: {' / '.join(phases)}"), rows, marked=OURS)
    return Section(
        "headline",
        "All workloads together",
        _headline_takeaway(results, phases),
        [
            Part(text=(text + _RATIO_SAID,), table=table),
            Part(pictures=_pictures(results, POOLED, "ttft")),
        ],
        "All systems got the same token ids in turn, in random order within a round. "
        + "; ".join(f"{p}: {PHASES[p]}" for p in phases if p in PHASES)
        + ". top-1 is the share of output tokens that a full fp32 forward of the same model finds"
        " most likely: a system is faster only if its outputs are as good. right facts is the share"
        " of outputs with the requested fact, which only the documents contain. These workloads use"
        " independent documents and short outputs; docs/concepts/exact-and-moved.md has moved text"
        " on harder tasks.",
        "Bars start at generate(); the thin line over a bar is the 95% interval of the ratio.",
    )


def _headline_takeaway(results: Results, phases: list[str]) -> str:
    said = []
    for phase in phases:
        ours = results.find(POOLED, phase, "ttft", MAIN)
        if ours is None:
            continue
        peer, ratio = _fastest_peer(results, phase)
        own, top1 = (percent(quality(results, POOLED, phase, s)) for s in (MAIN, peer))
        said.append(
            f"{phase} {times(ours['ratio'])} with top-1 {own}"
            f" (best of the others: {'generate()' if peer == BASELINE else peer},"
            f" {times(ratio)} with top-1 {top1})"
        )
    if not said:
        return "Times against Transformers' generate() on the same prompts."
    return f"First token of {MAIN}, as a share of generate()'s time: {joined(said)}."


def _fastest_peer(results: Results, phase: str) -> tuple[str, float]:
    """Return the fastest of the others and its ratio: the baseline if none is faster than it."""
    peers = [s for s in results.measured if s not in (*OURS, AGAIN)]
    found = [m for s in peers if (m := results.find(POOLED, phase, "ttft", s))]
    best = fastest([{"system": BASELINE, "ratio": 1.0}, *found])
    return best["system"], best["ratio"]


def workloads(results: Results) -> Section | None:
    """Return the section with each workload by itself."""
    if not results.workloads:
        return None
    return Section(
        "workloads",
        "Workload by workload",
        _workloads_takeaway(results),
        [part for workload in results.workloads for part in _workload(results, workload)],
        f"{_RATIO_SAID} The tables also compare our systems with each other system, pair by pair,"
        " with the 95% interval (none below six pairs): below 1, ours is faster.",
        "Bars start at generate(): to the left is faster, to the right slower; the thin line is the"
        " 95% interval.",
    )


def _workload(results: Results, workload: str) -> Sequence[Part]:
    said = _workload_sentence(results, workload)
    table = _workload_table(results, workload)
    return (
        Part(title=workload, text=(said,), pictures=_pictures(results, workload, "ttft")),
        Part(pictures=_pictures(results, workload, "total"), table=table),
    )


def _workload_sentence(results: Results, workload: str) -> str:
    lines = [results.find(workload, phase, "ttft", MAIN) for phase in results.phases(workload)]
    said = [
        f"{m['phase']} {ms(m['system_ms'])} ms against {ms(m['baseline_ms'])} ms"
        for m in lines
        if m is not None
    ]
    tokens = [m["prompt_tokens"] for m in results.measures if m["workload"] == workload]
    known = [t for t in tokens if t is not None]
    size = f"Prompts of about {sum(known) / len(known):,.0f} tokens. " if known else ""
    return f"{size}First token, {MAIN} against generate(): {joined(said)}." if said else size


def _workload_table(results: Results, workload: str) -> Table:
    ours = [s for s in COMPARED_WITH_ALL if s in results.measured]
    rows = []
    for phase in results.phases(workload):
        for metric, until in METRICS.items():
            for system in results.measured:
                direct = [results.find(workload, phase, metric, s, system) for s in ours]
                time = time_cell(results, workload, phase, metric, system)
                top1 = percent(quality(results, workload, phase, system))
                rows.append((system, phase, until, time, *map(with_interval, direct), top1))
    against = [f"{s} against it" for s in ours]
    return Table(
        ("system", "phase", "until", "ms (ratio)", *against, "top-1"),
        rows,
        "All figures, and our systems against each other one",
        marked=OURS,
    )


def _workloads_takeaway(results: Results) -> str:
    said = []
    for phase in PHASES:
        lines = [results.find(w, phase, "ttft", MAIN) for w in results.workloads]
        known = [m for m in lines if m is not None]
        if known:
            best, worst = fastest(known), slowest(known)
            ends = [f"{times(m['ratio'])} ({m['workload']})" for m in (best, worst)]
            said.append(f"{phase} {ends[0] if best is worst else 'from ' + ' to '.join(ends)}")
    return f"First token of {MAIN} against generate(): {joined(said)}." if said else ""
