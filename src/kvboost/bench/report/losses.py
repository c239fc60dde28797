"""The section "Where we lose": every comparison that went against us."""

from collections import Counter
from collections.abc import Sequence

from kvboost.bench.report.compared import slowest
from kvboost.bench.report.reading import (
    AGAIN,
    BASELINE,
    METRICS,
    OURS,
    POOLED,
    Line,
    Results,
    by_phase,
    by_system,
)
from kvboost.bench.report.section import Part, Section, Table, between, counted, percent, times

_QUALITIES = {"top1": "top-1", "score": "right facts"}


def outcome(measure: Line) -> str:
    """Say whether the whole interval is above one (lost), below it (won), or neither."""
    if measure["low"] is None or measure["low"] <= 1.0 <= measure["high"]:
        return "undecided"
    return "lost" if measure["low"] > 1.0 else "won"


def losses(results: Results, notes: Sequence[Part]) -> Section | None:
    """Return the section, with the parts of notes.md at its end."""
    lines = [
        m
        for m in results.measures
        if m["system"] in OURS and m["baseline"] not in (*OURS, AGAIN) and m["workload"] != POOLED
    ]
    if not lines and not notes:
        return None
    by_ratio = sorted(lines, key=lambda m: -m["ratio"])
    lost = [m for m in by_ratio if outcome(m) == "lost"]
    slower = [m for m in by_ratio if m["low"] is None and m["ratio"] > 1.0]
    judged = [
        m
        for m in lines
        if (m["baseline"], m["metric"]) == (BASELINE, "ttft")
        and None not in (m["top1"], m["baseline_top1"])
    ]
    worse = [m for m in judged if any(_gap(m, name) > 0 for name in _QUALITIES)]
    parts = [Part(title="Counted", table=_counts(lines))] if lines else []
    if lost:
        parts.append(Part(title="What is lost", table=_times_table(lost)))
        parts.append(Part(table=_listed(lost)))
    if slower:
        fold = f"Slower, too few pairs to say: {counted(len(slower), 'comparison')}"
        parts.append(Part(table=_times_table(slower, fold)))
    if worse:
        parts.append(Part(title="Outputs worse than generate()'s", table=_worse_answers(worse)))
    return Section(
        "losses",
        "Where we lose",
        _takeaway(lines, lost, len(judged), len(worse)) if lines else "",
        [*parts, *notes],
        "A comparison is one of our systems against another system on one workload, phase and"
        " metric. It is lost if the whole 95% interval of the ratio is above 1, won if it is below,"
        " and undecided without an interval (fewer than six pairs). Outputs are compared with"
        f" generate()'s by top-1 and right facts. {AGAIN} is generate() run a second time, and is"
        " left out here.",
    )


def _takeaway(lines: list[Line], lost: list[Line], num_judged: int, num_worse: int) -> str:
    num_won = sum(outcome(m) == "won" for m in lines)
    said = (
        f"We lose {len(lost)} of {counted(len(lines), 'comparison')} of speed and win {num_won},"
        f" with {len(lines) - len(lost) - num_won} undecided."
    )
    if lost:
        worst = slowest(lost)
        said += (
            f" The worst: {worst['system']} takes {times(worst['ratio'])} times as long as"
            f" {worst['baseline']} to the {METRICS[worst['metric']]} on {worst['workload']}"
            f" ({worst['phase']})."
        )
    if not num_judged:
        return f"{said} No output was compared."
    return f"{said} Outputs are worse than generate()'s in {num_worse} of {num_judged} cases."


def _counts(lines: list[Line]) -> Table:
    counts = Counter((m["system"], m["baseline"], outcome(m)) for m in lines)
    pairs = sorted({key[:2] for key in counts}, key=lambda pair: tuple(map(by_system, pair)))
    outcomes = ("lost", "won", "undecided")
    rows = [(*pair, *(str(counts[(*pair, each)]) for each in outcomes)) for pair in pairs]
    return Table(("ours", "against", *outcomes), rows)


def _times_table(lines: list[Line], fold: str = "") -> Table:
    found: dict[tuple[str, ...], list[str]] = {}
    for m in sorted(lines, key=_times_place):
        key = (m["system"], m["baseline"], f"{m['phase']}, {METRICS[m['metric']]}")
        found.setdefault(key, []).append(f"{m['workload']} {times(m['ratio'])}")
    rows = [(*key, ", ".join(where)) for key, where in found.items()]
    return Table(("ours", "against", "when", "where, and how many times as long"), rows, fold)


def _times_place(m: Line) -> tuple[object, ...]:
    systems = by_system(m["system"]), by_system(m["baseline"])
    return (*systems, by_phase(m["phase"]), [*METRICS].index(m["metric"]))


def _listed(lost: list[Line]) -> Table:
    rows = [
        (
            *(m["workload"], m["phase"], METRICS[m["metric"]], m["system"], m["baseline"]),
            *(times(m["ratio"]), between(m["low"], m["high"]), str(m["pairs"])),
        )
        for m in lost
    ]
    columns = ("workload", "phase", "until", "ours", "against", "ratio", "95% interval", "pairs")
    return Table(columns, rows, f"All {len(rows)} lost comparisons with their intervals")


def _gap(measure: Line, name: str) -> float:
    """Return how far a quality is below generate()'s; nothing where it is not known."""
    own, other = measure[name], measure[f"baseline_{name}"]
    return 0.0 if own is None or other is None else float(other - own)


def _worse_answers(worse: list[Line]) -> Table:
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, title in _QUALITIES.items():
        for m in sorted(worse, key=lambda m: -_gap(m, name)):
            if _gap(m, name) > 0:
                said = f"{m['workload']} {percent(m[name])} ({percent(m[f'baseline_{name}'])})"
                found.setdefault((m["system"], m["phase"], title), []).append(said)
    rows = [(*key, ", ".join(where)) for key, where in found.items()]
    rows.sort(key=lambda row: (by_system(row[0]), by_phase(row[1])))
    return Table(("ours", "phase", "of", "where: ours (generate()'s), the widest gap first"), rows)
