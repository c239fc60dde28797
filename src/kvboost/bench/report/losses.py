"""The section "Where we lose": every comparison that went against us."""

from collections.abc import Sequence

from kvboost.bench.report.formats import between, percent, times
from kvboost.bench.report.names import (
    AGAIN,
    BASELINE,
    METRICS,
    OURS,
    PHASES,
    POOLED,
    place,
    system_place,
)
from kvboost.bench.report.reading import Measure, Results
from kvboost.bench.report.section import Part, Row, Section, Table


def is_lost(measure: Measure) -> bool:
    """Say whether the whole interval, or the ratio where there is none, is above one."""
    return (measure.ratio if measure.low is None else measure.low) > 1.0


def is_won(measure: Measure) -> bool:
    """Say whether the whole interval, or the ratio where there is none, is below one."""
    return (measure.ratio if measure.high is None else measure.high) < 1.0


def compared(results: Results) -> list[Measure]:
    """Return ours against peers, workload by workload."""
    return [
        m
        for m in results.measures
        if m.system in OURS and m.baseline not in (*OURS, AGAIN) and m.workload != POOLED
    ]


def losses(results: Results, notes: Sequence[Part]) -> Section | None:
    """Return the section, with the parts of notes.md at its end."""
    lines = compared(results)
    if not lines and not notes:
        return None
    lost = [m for m in lines if is_lost(m)]
    parts = [Part(title="Counted", table=_counts(lines))] if lines else []
    if lost:
        for system in sorted({m.system for m in lost}, key=system_place):
            table = _grouped([m for m in lost if m.system == system])
            parts.append(Part(title=f"What {system} loses", table=table))
        parts.append(Part(table=_listed(lost)))
    worse = _worse_answers(results)
    if worse is not None:
        parts.append(Part(title="Answers below generate()'s", table=worse))
    return Section(
        "losses",
        "Where we lose",
        _takeaway(lines, lost),
        (*parts, *notes),
        "A comparison is one of our systems against one other on one workload, phase and metric."
        " It is lost when the whole 95% interval of the ratio is above 1 (or the ratio, where there"
        f" are too few pairs for an interval), won when it is below. {AGAIN} is left out here:"
        " it is generate() once more.",
    )


def _takeaway(lines: list[Measure], lost: list[Measure]) -> str:
    if not lost:
        return f"Of {len(lines)} comparisons none is lost." if lines else ""
    worst = max(lost, key=lambda m: m.ratio)
    return (
        f"{len(lost)} of {len(lines)} comparisons are lost,"
        f" {sum(map(is_won, lines))} are won. The worst: {worst.system} takes"
        f" {times(worst.ratio)} times as long as {worst.baseline} to the"
        f" {METRICS[worst.metric]} on {worst.workload} ({worst.phase})."
    )


def _counts(lines: list[Measure]) -> Table:
    rows = []
    pairs = {(m.system, m.baseline) for m in lines}
    for system, peer in sorted(pairs, key=lambda p: (system_place(p[0]), system_place(p[1]))):
        own = [m for m in lines if (m.system, m.baseline) == (system, peer)]
        num_lost, num_won = sum(map(is_lost, own)), sum(map(is_won, own))
        counts = (num_lost, num_won, len(own) - num_won - num_lost)
        rows.append(Row((system, peer, *map(str, counts))))
    return Table(("ours", "against", "lost", "won", "undecided"), tuple(rows))


def _grouped(lost: list[Measure]) -> Table:
    groups: dict[tuple[str, str, str], list[Measure]] = {}
    for m in lost:
        groups.setdefault((m.baseline, m.phase, m.metric), []).append(m)
    rows = []
    for (peer, phase, metric), group in sorted(groups.items(), key=lambda g: _group_place(g[0])):
        worst_first = sorted(group, key=lambda m: -m.ratio)
        where = ", ".join(f"{m.workload} {times(m.ratio)}" for m in worst_first)
        rows.append(Row((peer, f"{phase}, {METRICS[metric]}", where)))
    return Table(("against", "when", "where, and how many times as long"), tuple(rows))


def _group_place(group: tuple[str, str, str]) -> tuple[object, ...]:
    peer, phase, metric = group
    return (system_place(peer), place(phase, PHASES), metric != "ttft")


def _listed(lost: list[Measure]) -> Table:
    ordered = sorted(lost, key=lambda m: -m.ratio)
    rows = tuple(
        Row(
            (
                m.workload,
                m.phase,
                METRICS[m.metric],
                m.system,
                m.baseline,
                times(m.ratio),
                between(m.low, m.high),
                str(m.pairs),
            )
        )
        for m in ordered
    )
    columns = ("workload", "phase", "until", "ours", "against", "ratio", "95% interval", "pairs")
    return Table(columns, rows, f"All {len(rows)} lost comparisons with their intervals")


def _worse_answers(results: Results) -> Table | None:
    groups: dict[tuple[str, str], list[str]] = {}
    for m in sorted(results.measures, key=lambda m: (m.top1 or 0) - (m.baseline_top1 or 0)):
        if m.system not in OURS or (m.baseline, m.metric) != (BASELINE, "ttft"):
            continue
        if m.workload == POOLED or m.top1 is None or m.baseline_top1 is None:
            continue
        if m.top1 < m.baseline_top1:
            said = f"{m.workload} {percent(m.top1)} ({percent(m.baseline_top1)})"
            groups.setdefault((m.system, m.phase), []).append(said)
    rows = [
        Row((system, phase, ", ".join(where)))
        for (system, phase), where in sorted(groups.items(), key=lambda g: _answers_place(g[0]))
    ]
    columns = ("ours", "phase", "where: top-1 (generate()'s), the widest gap first")
    return Table(columns, tuple(rows)) if rows else None


def _answers_place(group: tuple[str, str]) -> tuple[object, ...]:
    return (system_place(group[0]), place(group[1], PHASES))
