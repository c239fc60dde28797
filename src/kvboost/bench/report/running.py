"""Sections on where the time goes, on traffic, and on the noise of the machine."""

from collections.abc import Sequence
from statistics import mean

from kvboost.bench.report.compared import ratio_bar
from kvboost.bench.report.reading import (
    AGAIN,
    BASELINE,
    METRICS,
    OURS,
    POOLED,
    STAGES,
    Line,
    Results,
    by_phase,
    by_system,
    by_workload,
    family,
    grouped,
    known,
    place,
)
from kvboost.bench.report.section import (
    Part,
    Picture,
    Section,
    Table,
    joined,
    ms,
    percent,
    with_interval,
)
from kvboost.drawing import plots


def stages(results: Results) -> Section | None:
    """Return the section on the stages of a request."""
    lines = sorted(results.stages, key=lambda s: by_workload(s["workload"]))
    if not lines:
        return None
    names = sorted({name for s in lines for name in s["stages_ms"]}, key=_stage_place)
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
        _stages_takeaway([s for s in lines if s["workload"] != POOLED] or lines, names),
        parts,
        "Stages run one after another. Each cell is a separate median, so a row need not add up to"
        " its total. The covered share is the sum of a request's stages over its wall-clock time;"
        " the rest is not attributed to any stage.",
    )


def _stage_place(name: str) -> tuple[int, str]:
    return place(name, STAGES)


def _waterfall(lines: Sequence[Line], names: list[str], phase: str) -> str:
    rows = []
    for line in lines:
        total_ms, covered = line["total_ms"], line["covered"]
        pieces = {f"stage-{name}": line["stages_ms"].get(name, 0.0) for name in names}
        pieces["stage-rest"] = 0.0 if covered is None else (1.0 - covered) * total_ms
        shown = tuple((css, length) for css, length in pieces.items() if length > 0)
        rows.append(plots.Stack(line["workload"], shown, ms(total_ms)))
    keys = [*((name, f"stage-{name}") for name in names), ("not covered", "stage-rest")]
    return plots.stacks(rows, keys, plots.Scale("ms", from_zero=True), f"stages, {phase}")


def _stage_cells(line: Line, names: list[str]) -> tuple[str, ...]:
    times_ms = [ms(line["stages_ms"].get(name)) for name in names]
    covered = [percent(line[name]) for name in ("covered", "least_covered")]
    about = (line["workload"], line["phase"])
    return (*about, *times_ms, ms(line["total_ms"]), *covered, str(line["answers"]))


def _stages_takeaway(lines: Sequence[Line], names: list[str]) -> str:
    means = {n: sum(line["stages_ms"].get(n, 0.0) for line in lines) / len(lines) for n in names}
    most = max(means, key=lambda name: means[name])
    share = means[most] / (sum(means.values()) or 1.0)
    part = "Most" if share > 0.5 else "The largest part"
    said = f"{part} of the time goes to {most} ({percent(share)})"
    if covered := known(lines, "covered", "least_covered"):
        usual = percent(mean(line["covered"] for line in covered))
        least = percent(min(line["least_covered"] for line in covered))
        said += f"; stages cover {usual} of the wall clock, and at least {least}"
    return f"{said}."


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
    fastest = sorted(lines, key=lambda t: float(t["ttft_p95_ms"]))
    ours = next((n for n, t in enumerate(fastest, 1) if t["system"] in OURS), None)
    own = f"; our best system is number {ours} of {len(lines)}" if ours else ""
    requests = lines[0]["requests"]
    return Section(
        "traffic",
        "Traffic",
        f"With {requests} requests arriving on the same schedule, {fastest[0]['system']} has"
        f" the lowest p95 of the first token, {ms(fastest[0]['ttft_p95_ms'])} ms{own}.",
        [Part(pictures=pictures, table=table)],
        "A request's clock starts when it arrives, so queueing counts. p50 is the median, p95"
        f" the 95th percentile: of {requests} requests, roughly the slowest one.",
        "The dot is the median, the end of the line the 95th percentile.",
    )


def noise(results: Results) -> Section | None:
    """Return the section on the baseline against itself."""
    lines = sorted(
        (m for m in results.measures if (m["system"], m["baseline"]) == (AGAIN, BASELINE)),
        key=lambda m: (by_workload(m["workload"]), by_phase(m["phase"]), m["metric"]),
    )
    if not lines:
        return None
    scale = plots.Scale("generate() again, generate() = 1", is_log=True, mark=1.0)
    pictures = []
    for metric, own in grouped(lines, "metric", [*METRICS].index).items():
        bars = [ratio_bar(f"{m['workload']}, {m['phase']}", BASELINE, m) for m in own]
        until = METRICS[metric]
        drawn = plots.bars(bars, scale, f"noise, {until}")
        pictures.append(Picture(until.capitalize(), drawn))
    rows = [
        (m["workload"], m["phase"], METRICS[m["metric"]], with_interval(m), str(m["pairs"]))
        for m in lines
    ]
    columns = ("workload", "phase", "until", "ratio (95% interval)", "pairs")
    return Section(
        "noise",
        "Noise floor",
        _noise_takeaway(lines),
        [Part(pictures=pictures, table=Table(columns, rows, "All figures"))],
        "The same program ran twice, as two systems. Intervals should contain 1.",
    )


def _noise_takeaway(lines: Sequence[Line]) -> str:
    said = []
    for where, is_pooled in (
        ("over all workloads together", True),
        ("on a single workload", False),
    ):
        own = [m for m in lines if (m["workload"] == POOLED) == is_pooled]
        if own:
            worst = max(own, key=_off)
            names = [*([] if is_pooled else [worst["workload"]]), worst["phase"]]
            names.append(METRICS[worst["metric"]])
            said.append(f"up to {percent(_off(worst))} {where} ({', '.join(names)})")
    return (
        f"The ratio of generate() to itself differs from 1 by {joined(said)}: smaller differences"
        " in this report mean nothing."
    )


def _off(measure: Line) -> float:
    return float(abs(measure["ratio"] - 1.0))
