"""Sections that set systems beside each other: all workloads pooled, one by one, and our losses."""

from collections import Counter
from collections.abc import Sequence

from kvboost.bench.report.asked import RATIO
from kvboost.bench.report.reading import (
    AGAIN,
    BASELINE,
    METRICS,
    OURS,
    PHASES,
    POOLED,
    Line,
    Results,
    by_system,
    family,
)
from kvboost.bench.report.section import (
    NONE,
    Part,
    Picture,
    Section,
    Table,
    between,
    ms,
    percent,
    ratio_bar,
    times,
)
from kvboost.drawing import plots

_QUALITIES = {"top1": "top-1", "score": "right facts"}


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


def headline(results: Results) -> Section | None:
    """Return the section with all workloads pooled."""
    if not results.phases(POOLED):
        return None
    return Section(
        "headline",
        "All workloads together",
        "How fast are the systems, and are their outputs as good?",
        _workload(results, POOLED),
        "In brackets: the ratio to the time of Transformers' generate() for the same prompts. A"
        " ratio is the median over pairs of the same prompt and round, not the quotient of the two"
        " medians. All systems got the same token ids in turn, in random order within a round. "
        + "; ".join(f"{phase}: {said}" for phase, said in PHASES.items())
        + ". top-1 is the share of output tokens that a full fp32 forward of the same model finds"
        " most likely: a system is faster only if its outputs are as good. right facts is the share"
        f" of outputs with the requested fact, which only the documents contain. {AGAIN} is"
        " generate() run a second time: what it differs from 1 is noise, and so is as much of any"
        " other. These workloads use independent documents and short outputs;"
        " docs/concepts/exact-and-moved.md has moved text on harder tasks.",
        "Bars start at generate(): to the left is faster, to the right slower; the thin line over a"
        " bar is the 95% interval of the ratio, which needs six pairs.",
    )


def workloads(results: Results) -> Section | None:
    """Return the section with each workload by itself."""
    if not results.workloads:
        return None
    parts = [part for workload in results.workloads for part in _workload(results, workload)]
    return Section("workloads", "Workload by workload", "The same for each workload.", parts)


def _workload(results: Results, workload: str) -> Sequence[Part]:
    tokens = [m["prompt_tokens"] for m in results.measures if m["workload"] == workload]
    known = [each for each in tokens if each is not None]
    said = [f"Prompts of about {sum(known) / len(known):,.0f} tokens."] if known else []
    return (
        Part(
            "" if workload == POOLED else workload, tuple(said), table=_figures(results, workload)
        ),
        *(Part(pictures=_pictures(results, workload, metric)) for metric in METRICS),
    )


def _figures(results: Results, workload: str) -> Table:
    """Times, ratios and quality: a row for each system."""
    phases = results.phases(workload)
    own = [m for m in results.measures if m["workload"] == workload]
    shown = {name: title for name, title in _QUALITIES.items() if any(m[name] for m in own)}
    columns = [f"{phase}: {until}, ms" for until in METRICS.values() for phase in phases]
    columns += [f"{phase}: {title}" for title in shown.values() for phase in phases]
    rows = []
    for system in results.measured:
        cells = [time_cell(results, workload, p, m, system) for m in METRICS for p in phases]
        cells += [
            percent(quality(results, workload, p, system, name)) for name in shown for p in phases
        ]
        lines = [results.find(workload, phase, "ttft", system) for phase in phases]
        pairs = " / ".join(str(line["pairs"]) if line else NONE for line in lines)
        if any(cell != NONE for cell in cells):
            rows.append((system, *cells, pairs))
    return Table(("system", *columns, f"pairs: {' / '.join(phases)}"), rows, marked=OURS)


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


def outcome(measure: Line) -> str:
    """Say whether the whole interval is above one (lost), below it (won), or neither."""
    if measure["low"] is None or measure["low"] <= 1.0 <= measure["high"]:
        return "undecided"
    return "lost" if measure["low"] > 1.0 else "won"


def losses(results: Results, notes: Sequence[Part]) -> Section | None:
    """Return the section "Where we lose", with the parts of notes.md at its end."""
    lines = [
        m
        for m in results.measures
        if m["system"] in OURS and m["baseline"] not in (*OURS, AGAIN) and m["workload"] != POOLED
    ]
    if not lines and not notes:
        return None
    lost = [m for m in lines if outcome(m) == "lost"]
    made = {
        "Counted": _counts(lines),
        "What is lost": _listed(lost),
        "": _listed(lines, f"All {len(lines)} comparisons, the worst first"),
        "Outputs worse than generate()'s": _worse(lines),
    }
    return Section(
        "losses",
        "Where we lose",
        f"Lost are {len(lost)} of {len(lines)} comparisons of speed.",
        [*(Part(title, table=each) for title, each in made.items() if each.rows), *notes],
        "A comparison is one of our systems against another system on one workload, phase and"
        " metric. It is lost if the whole 95% interval of the ratio is above 1, won if it is below,"
        " and undecided without an interval (fewer than six pairs). Outputs are compared with"
        f" generate()'s by top-1 and right facts. {AGAIN} is left out here.",
    )


def _counts(lines: Sequence[Line]) -> Table:
    counts = Counter((m["system"], m["baseline"], outcome(m)) for m in lines)
    pairs = sorted({key[:2] for key in counts}, key=lambda pair: tuple(map(by_system, pair)))
    outcomes = ("lost", "won", "undecided")
    rows = [(*pair, *(str(counts[(*pair, each)]) for each in outcomes)) for pair in pairs]
    return Table(("ours", "against", *outcomes), rows)


def _listed(lines: Sequence[Line], fold: str = "") -> Table:
    rows = [
        (
            *(m["workload"], m["phase"], METRICS[m["metric"]], m["system"], m["baseline"]),
            *(times(m["ratio"]), between(m["low"], m["high"]), str(m["pairs"]), outcome(m)),
        )
        for m in sorted(lines, key=lambda m: -m["ratio"])
    ]
    columns = ("workload", "phase", "until", "ours", "against", "ratio", "95% interval", "pairs")
    return Table((*columns, "outcome"), rows, fold)


def _worse(lines: Sequence[Line]) -> Table:
    rows = [
        (m["workload"], m["phase"], m["system"], title, *map(percent, (own, bare)))
        for m in lines
        for name, title in _QUALITIES.items()
        if (m["baseline"], m["metric"]) == (BASELINE, "ttft")
        and None not in (own := m[name], bare := m[f"baseline_{name}"])
        and own < bare
    ]
    return Table(("workload", "phase", "ours", "of", "ours", "generate()'s"), rows)
