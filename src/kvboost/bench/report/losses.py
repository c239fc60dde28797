"""The section "Where we lose": every comparison that went against us."""

from collections.abc import Sequence

from kvboost.bench.report.formats import between, counted, percent, times
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

_QUALITIES = {"top1": "top-1", "score": "right facts"}


def is_lost(measure: Measure) -> bool:
    """Say whether the whole interval is above one."""
    return measure.low is not None and measure.low > 1.0


def is_won(measure: Measure) -> bool:
    """Say whether the whole interval is below one."""
    return measure.high is not None and measure.high < 1.0


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
    slower = [m for m in lines if m.low is None and m.ratio > 1.0]
    worse = [m for m in _judged(lines) if _is_worse(m)]
    parts = [Part(title="Counted", table=_counts(lines))] if lines else []
    if lost:
        parts.append(Part(title="What is lost", table=_grouped(lost)))
        parts.append(Part(table=_listed(lost)))
    if slower:
        fold = f"Slower, too few pairs to say: {counted(len(slower), 'comparison')}"
        parts.append(Part(table=_grouped(slower, fold)))
    if worse:
        parts.append(Part(title="Outputs worse than generate()'s", table=_worse_answers(worse)))
    return Section(
        "losses",
        "Where we lose",
        _takeaway(lines, lost, worse) if lines else "",
        (*parts, *notes),
        "A comparison is one of our systems against another system on one workload, phase and"
        " metric. It is lost if the whole 95% interval of the ratio is above 1, won if it is below,"
        " and undecided without an interval (fewer than six pairs). Outputs are compared with"
        f" generate()'s by top-1 and right facts. {AGAIN} is generate() run a second time, and is"
        " left out here.",
    )


def _takeaway(lines: list[Measure], lost: list[Measure], worse: list[Measure]) -> str:
    num_won, num_cases = sum(map(is_won, lines)), len(_judged(lines))
    said = (
        f"We lose {len(lost)} of {counted(len(lines), 'comparison')} of speed and win {num_won},"
        f" with {len(lines) - len(lost) - num_won} undecided."
    )
    if lost:
        worst = max(lost, key=lambda m: m.ratio)
        said += (
            f" The worst: {worst.system} takes {times(worst.ratio)} times as long as"
            f" {worst.baseline} to the {METRICS[worst.metric]} on {worst.workload} ({worst.phase})."
        )
    if not num_cases:
        return f"{said} No output was compared."
    return f"{said} Outputs are worse than generate()'s in {len(worse)} of {num_cases} cases."


def _counts(lines: list[Measure]) -> Table:
    rows = []
    pairs = {(m.system, m.baseline) for m in lines}
    for system, peer in sorted(pairs, key=lambda p: (system_place(p[0]), system_place(p[1]))):
        own = [m for m in lines if (m.system, m.baseline) == (system, peer)]
        num_lost, num_won = sum(map(is_lost, own)), sum(map(is_won, own))
        counts = (num_lost, num_won, len(own) - num_won - num_lost)
        rows.append(Row((system, peer, *map(str, counts))))
    return Table(("ours", "against", "lost", "won", "undecided"), tuple(rows))


def _grouped(lines: list[Measure], fold: str = "") -> Table:
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for m in sorted(lines, key=lambda m: -m.ratio):
        group = groups.setdefault((m.system, m.baseline, m.phase, m.metric), [])
        group.append(f"{m.workload} {times(m.ratio)}")
    rows = tuple(
        Row((system, peer, f"{phase}, {METRICS[metric]}", ", ".join(where)))
        for (system, peer, phase, metric), where in sorted(groups.items(), key=_group_place)
    )
    return Table(("ours", "against", "when", "where, and how many times as long"), rows, fold)


def _group_place(item: tuple[tuple[str, str, str, str], list[str]]) -> tuple[object, ...]:
    system, peer, phase, metric = item[0]
    return (system_place(system), system_place(peer), place(phase, PHASES), metric != "ttft")


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


def _judged(lines: list[Measure]) -> list[Measure]:
    """Return a line for each case whose answers were judged beside generate()'s."""
    return [
        m
        for m in lines
        if (m.baseline, m.metric) == (BASELINE, "ttft") and None not in (m.top1, m.baseline_top1)
    ]


def _gap(measure: Measure, name: str) -> float:
    """Return how far a quality is below generate()'s; nothing where it is not known."""
    own, other = getattr(measure, name), getattr(measure, f"baseline_{name}")
    return 0.0 if own is None or other is None else float(other - own)


def _is_worse(measure: Measure) -> bool:
    return any(_gap(measure, name) > 0 for name in _QUALITIES)


def _worse_answers(worse: list[Measure]) -> Table:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, title in _QUALITIES.items():
        for m in sorted(worse, key=lambda m: -_gap(m, name)):
            if _gap(m, name) > 0:
                own, other = (percent(getattr(m, n)) for n in (name, f"baseline_{name}"))
                where = groups.setdefault((m.system, m.phase, title), [])
                where.append(f"{m.workload} {own} ({other})")
    rows = tuple(Row((*key, ", ".join(groups[key]))) for key in sorted(groups, key=_answers_place))
    return Table(("ours", "phase", "of", "where: ours (generate()'s), the widest gap first"), rows)


def _answers_place(group: tuple[str, str, str]) -> tuple[object, ...]:
    return (system_place(group[0]), place(group[1], PHASES), group[2] != "top-1")
