"""Sections on where the time goes, and on traffic."""

from collections.abc import Sequence

from kvboost.bench.report.reading import (
    METRICS,
    OURS,
    STAGES,
    Line,
    Results,
    by_phase,
    by_system,
    by_workload,
    family,
    grouped,
    place,
)
from kvboost.bench.report.section import Part, Picture, Section, Table, ms, percent
from kvboost.drawing import plots


def stages(results: Results) -> Section | None:
    """Return the section on the stages of a request."""
    lines = sorted(results.stages, key=lambda s: by_workload(s["workload"]))
    if not lines:
        return None
    names = sorted({name for s in lines for name in s["stages_ms"]}, key=lambda n: place(n, STAGES))
    parts = []
    for system, own in grouped(lines, "system", by_system).items():
        phases = grouped(own, "phase", by_phase)
        pictures = [Picture(phase, _waterfall(phases[phase], names, phase)) for phase in phases]
        rows = [_stage_cells(line, names) for of_phase in phases.values() for line in of_phase]
        columns = ("workload", "phase", *(f"{n}, ms" for n in names), "total, ms")
        table = Table((*columns, "covered", "least", "answers"), rows, "All stages in ms")
        parts.append(Part(title=system, pictures=pictures, table=table))
    return Section(
        "stages",
        "Where the time goes",
        "Which stages of a request take how long?",
        parts,
        "Stages run one after another. Each cell is a separate median, so a row need not add up to"
        " its total. The covered share is the sum of a request's stages over its wall-clock time;"
        " the rest is not attributed to any stage.",
    )


def _waterfall(lines: Sequence[Line], names: list[str], phase: str) -> str:
    rows = []
    for line in lines:
        total_ms = line["total_ms"]
        pieces = {f"stage-{name}": line["stages_ms"].get(name, 0.0) for name in names}
        pieces["stage-rest"] = (1.0 - line["covered"]) * total_ms
        shown = tuple((css, length) for css, length in pieces.items() if length > 0)
        rows.append(plots.Stack(line["workload"], shown, ms(total_ms)))
    keys = [*((name, f"stage-{name}") for name in names), ("not covered", "stage-rest")]
    return plots.stacks(rows, keys, plots.Scale("ms", from_zero=True), f"stages, {phase}")


def _stage_cells(line: Line, names: list[str]) -> tuple[str, ...]:
    times_ms = [ms(line["stages_ms"].get(name)) for name in names]
    covered = [percent(line[name]) for name in ("covered", "least_covered")]
    about = (line["workload"], line["phase"])
    return (*about, *times_ms, ms(line["total_ms"]), *covered, str(line["answers"]))


def traffic(results: Results) -> Section | None:
    """Return the section on requests that arrive while others run."""
    lines = sorted(results.traffic, key=lambda t: by_system(t["system"]))
    if not lines:
        return None
    pictures, columns = [], []
    for metric, until in METRICS.items():
        rows = []
        for t in lines:
            p50, p95 = t[f"{metric}_p50_ms"], t[f"{metric}_p95_ms"]
            rows.append(plots.Bar(t["system"], family(t["system"]), p50, p50, p95, ms(p50)))
        title = f"{until.capitalize()}, p50 to p95"
        pictures.append(Picture(title, plots.bars(rows, plots.Scale("ms", is_log=True), title)))
        columns += [f"{until} p50, ms", "p95"]
    fields = [f"{metric}_p{quantile}_ms" for metric in METRICS for quantile in (50, 95)]
    cells = [
        (t["system"], *(ms(t[f]) for f in fields), f"{t['seconds']:.1f}", str(t["repeats"]))
        for t in lines
    ]
    table = Table(("system", *columns, "all, s", "repeats"), cells, marked=OURS)
    return Section(
        "traffic",
        "Traffic",
        f"How long do {lines[0]['requests']} requests wait that arrive on the same schedule?",
        [Part(pictures=pictures, table=table)],
        "A request's clock starts when it arrives, so queueing counts. p50 is the median, p95 the"
        " 95th percentile: of few requests, roughly the slowest one.",
        "The dot is the median, the end of the line the 95th percentile.",
    )
