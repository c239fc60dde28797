"""Sections that set systems beside each other: all workloads pooled, and one by one."""

from kvboost.bench.report import plots
from kvboost.bench.report.formats import NONE, joined, ms, percent, times, with_interval
from kvboost.bench.report.names import (
    AGAIN,
    BASELINE,
    COMPARED_WITH_ALL,
    MAIN,
    METRICS,
    OURS,
    PHASE_MEANINGS,
    POOLED,
    family,
)
from kvboost.bench.report.reading import Measure, Results
from kvboost.bench.report.section import Part, Picture, Row, Section, Table

RATIO = plots.Scale("time, generate() = 1, left is faster", is_log=True, mark=1.0)
_RATIO_SAID = (
    "A ratio is the median over pairs of the same prompt and round, not the quotient of the two"
    " medians."
)


def _time_cell(results: Results, workload: str, phase: str, metric: str, system: str) -> str:
    """Write the time of a system in ms and, in brackets, its ratio to the baseline's."""
    if system == BASELINE:
        bare = results.bare(workload, phase, metric)
        return NONE if bare is None else f"{ms(bare.baseline_ms)} (1.00)"
    line = results.find(workload, phase, metric, system)
    return NONE if line is None else f"{ms(line.system_ms)} ({times(line.ratio)})"


def quality(
    results: Results, workload: str, phase: str, system: str, name: str = "top1"
) -> float | None:
    """Return the share of a system's tokens that the fp32 model would have chosen, or its score."""
    if system == BASELINE:
        line, name = results.bare(workload, phase, "ttft"), f"baseline_{name}"
    else:
        line = results.find(workload, phase, "ttft", system)
    found: float | None = getattr(line, name) if line else None
    return found


def pictures(results: Results, workload: str, metric: str) -> tuple[Picture, ...]:
    """Draw every system against the baseline: a drawing for each phase, all on one scale."""
    lines = {
        phase: [results.find(workload, phase, metric, s) for s in results.measured]
        for phase in results.phases(workload)
    }
    every = [m for found in lines.values() for m in found if m is not None]
    over = [v for m in every for v in (m.ratio, m.low, m.high) if v is not None]
    made = []
    for phase, found in lines.items():
        rows = [_bar(m) for m in found if m is not None]
        title = f"{phase}: {METRICS[metric]}"
        if rows:
            made.append(Picture(title, plots.bars(rows, RATIO, f"{workload}, {title}", over)))
    return tuple(made)


def _bar(m: Measure) -> plots.Bar:
    return plots.Bar(m.system, family(m.system), m.ratio, m.low, m.high, times(m.ratio))


def headline(results: Results) -> Section | None:
    """Return the section with all workloads pooled."""
    phases = results.phases(POOLED)
    if not phases:
        return None
    has_score = any(m.score is not None for m in results.measures if m.workload == POOLED)
    columns = ["system", *(f"{p}: first token, ms" for p in phases)]
    columns += [f"{p}: whole answer, ms" for p in phases]
    columns += [f"{p}: top-1" for p in phases]
    columns += [f"{p}: right facts" for p in phases] if has_score else []
    columns.append(f"pairs: {' / '.join(phases)}")
    rows = tuple(_headline_row(results, s, phases, has_score=has_score) for s in results.measured)
    text = "In brackets: the ratio to the time of Transformers' generate() for the same prompts. "
    return Section(
        "headline",
        "All workloads together",
        _headline_takeaway(results, phases),
        (
            Part(text=(text + _RATIO_SAID,), table=Table(tuple(columns), rows)),
            Part(pictures=pictures(results, POOLED, "ttft")),
        ),
        "All systems got the same token ids in turn, in random order within a round. "
        + "; ".join(f"{p}: {PHASE_MEANINGS[p]}" for p in phases if p in PHASE_MEANINGS)
        + ". top-1 is the share of output tokens that a full fp32 forward of the same model finds"
        " most likely: a system is faster only if its outputs are as good. right facts is the share"
        " of outputs with the requested fact, which only the documents contain. These workloads use"
        " independent documents and short outputs; docs/concepts/exact-and-moved.md has moved text"
        " on harder tasks.",
        "Bars start at generate(); the thin line over a bar is the 95% interval of the ratio.",
    )


def _headline_row(results: Results, system: str, phases: list[str], *, has_score: bool) -> Row:
    cells = [system]
    cells += [_time_cell(results, POOLED, p, m, system) for m in METRICS for p in phases]
    cells += [percent(quality(results, POOLED, p, system)) for p in phases]
    if has_score:
        cells += [percent(quality(results, POOLED, p, system, "score")) for p in phases]
    lines = [results.find(POOLED, p, "ttft", system) for p in phases]
    cells.append(" / ".join(str(m.pairs) if m else NONE for m in lines))
    return Row(tuple(cells), system in OURS)


def _headline_takeaway(results: Results, phases: list[str]) -> str:
    said = []
    for phase in phases:
        ours = results.find(POOLED, phase, "ttft", MAIN)
        if ours is None:
            continue
        peer, ratio = _fastest_peer(results, phase)
        own, top1 = (percent(quality(results, POOLED, phase, s)) for s in (MAIN, peer))
        said.append(
            f"{phase} {times(ours.ratio)} with top-1 {own}"
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
    best = min(found, key=_ratio, default=None)
    return (best.system, best.ratio) if best and best.ratio < 1.0 else (BASELINE, 1.0)


def workloads(results: Results) -> Section | None:
    """Return the section with each workload by itself."""
    parts = [part for workload in results.workloads for part in _workload(results, workload)]
    if not parts:
        return None
    return Section(
        "workloads",
        "Workload by workload",
        _workloads_takeaway(results),
        tuple(parts),
        f"{_RATIO_SAID} The tables also compare our systems with each other system, pair by pair,"
        " with the 95% interval (none below six pairs): below 1, ours is faster.",
        "Bars start at generate(): to the left is faster, to the right slower; the thin line is the"
        " 95% interval.",
    )


def _workload(results: Results, workload: str) -> tuple[Part, Part]:
    sentence = _workload_sentence(results, workload)
    table = _workload_table(results, workload)
    return (
        Part(title=workload, text=(sentence,), pictures=pictures(results, workload, "ttft")),
        Part(pictures=pictures(results, workload, "total"), table=table),
    )


def _workload_sentence(results: Results, workload: str) -> str:
    said = []
    for phase in results.phases(workload):
        line = results.find(workload, phase, "ttft", MAIN)
        if line is not None:
            said.append(f"{phase} {ms(line.system_ms)} ms against {ms(line.baseline_ms)} ms")
    tokens = [m.prompt_tokens for m in results.measures if m.workload == workload]
    known = [t for t in tokens if t is not None]
    size = f"Prompts of about {sum(known) / len(known):,.0f} tokens. " if known else ""
    return f"{size}First token, {MAIN} against generate(): {joined(said)}." if said else size


def _workload_table(results: Results, workload: str) -> Table:
    ours = [s for s in COMPARED_WITH_ALL if s in results.measured]
    columns = ("system", "phase", "until", "ms (ratio)", *(f"{s} against it" for s in ours))
    rows = []
    for phase in results.phases(workload):
        for metric, until in METRICS.items():
            for system in results.measured:
                direct = [results.find(workload, phase, metric, s, system) for s in ours]
                time = _time_cell(results, workload, phase, metric, system)
                cells = (system, phase, until, time, *map(with_interval, direct))
                top1 = percent(quality(results, workload, phase, system))
                rows.append(Row((*cells, top1), system in OURS))
    return Table(
        (*columns, "top-1"), tuple(rows), "All figures, and our systems against each other one"
    )


def _workloads_takeaway(results: Results) -> str:
    said = []
    for phase in PHASE_MEANINGS:
        lines = [results.find(w, phase, "ttft", MAIN) for w in results.workloads]
        known = [m for m in lines if m is not None]
        if known:
            best, worst = min(known, key=_ratio), max(known, key=_ratio)
            ends = [f"{times(m.ratio)} ({m.workload})" for m in (best, worst)]
            span = ends[0] if best is worst else f"from {' to '.join(ends)}"
            said.append(f"{phase} {span}")
    return f"First token of {MAIN} against generate(): {joined(said)}." if said else ""


def _ratio(measure: Measure) -> float:
    return measure.ratio
