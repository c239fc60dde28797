"""Sections on where the time goes, on traffic, and on the noise of the machine."""

from kvboost.bench.report import plots
from kvboost.bench.report.formats import joined, ms, percent, times, with_interval
from kvboost.bench.report.names import (
    AGAIN,
    METRICS,
    OURS,
    PHASES,
    POOLED,
    STAGES,
    family,
    place,
    system_place,
    workload_place,
)
from kvboost.bench.report.reading import Measure, Results, Stages
from kvboost.bench.report.section import Part, Picture, Row, Section, Table

_REST = "not covered"


def stages(results: Results) -> Section | None:
    """Return the section on the stages of a request."""
    lines = results.stages
    if not lines:
        return None
    names = _stage_names(lines)
    parts = []
    for system in sorted({s.system for s in lines}, key=system_place):
        own = sorted((s for s in lines if s.system == system), key=_line_place)
        pictures = tuple(
            _waterfall([s for s in own if s.phase == phase], names, phase)
            for phase in sorted({s.phase for s in own}, key=lambda p: place(p, PHASES))
        )
        parts.append(Part(title=system, pictures=pictures, table=_stage_table(own, names)))
    return Section(
        "stages",
        "Where the time goes",
        _stages_takeaway(lines),
        tuple(parts),
        "Stages run one after another. Each cell is a separate median, so a row need not add up to"
        " its total. The covered share is the sum of a request's stages over its wall-clock time;"
        " the rest is not attributed to any stage.",
    )


def _waterfall(lines: list[Stages], names: list[str], phase: str) -> Picture:
    keys = [(name, f"stage-{name}") for name in names]
    rows = []
    for one in lines:
        pieces = [(f"stage-{n}", one.stages_ms.get(n, 0.0)) for n in names]
        rest = 0.0 if one.covered is None else (1.0 - one.covered) * one.total_ms
        pieces.append(("stage-rest", rest))
        rows.append(
            plots.Stack(one.workload, tuple(p for p in pieces if p[1] > 0), ms(one.total_ms))
        )
    scale = plots.Scale("ms", from_zero=True)
    drawn = plots.stacks(rows, [*keys, (_REST, "stage-rest")], scale, f"stages, {phase}")
    return Picture(phase, drawn)


def _stage_table(lines: list[Stages], names: list[str]) -> Table:
    rows = []
    for s in lines:
        times_ms = [ms(s.stages_ms.get(name)) for name in names]
        covered = (percent(s.covered), percent(s.least_covered))
        rows.append(Row((s.workload, s.phase, *times_ms, ms(s.total_ms), *covered, str(s.answers))))
    columns = ("workload", "phase", *(f"{n}, ms" for n in names), "total, ms")
    return Table((*columns, "covered", "least", "answers"), tuple(rows), "All stages in ms")


def _stage_names(lines: tuple[Stages, ...]) -> list[str]:
    return sorted({n for s in lines for n in s.stages_ms}, key=lambda n: place(n, STAGES))


def _line_place(line: Stages) -> tuple[object, ...]:
    return (place(line.phase, PHASES), workload_place(line.workload))


def _stages_takeaway(all_lines: tuple[Stages, ...]) -> str:
    lines = [s for s in all_lines if s.workload != POOLED] or all_lines
    covered = [s.covered for s in lines if s.covered is not None]
    least = [s.least_covered for s in lines if s.least_covered is not None]
    sums: dict[str, float] = {}
    for line in lines:
        for name, value in line.stages_ms.items():
            sums[name] = sums.get(name, 0.0) + value / len(lines)
    most = max(sums, key=lambda name: sums[name])
    share = sums[most] / (sum(sums.values()) or 1.0)
    part = "Most" if share > 0.5 else "The largest part"
    said = f"{part} of the time goes to {most} ({percent(share)})"
    if covered and least:
        mean = sum(covered) / len(covered)
        said += (
            f"; stages cover {percent(mean)} of the wall clock, and at least {percent(min(least))}"
        )
    return f"{said}."


def traffic(results: Results) -> Section | None:
    """Return the section on requests that arrive while others run."""
    lines = sorted(results.traffic, key=lambda t: system_place(t.system))
    if not lines:
        return None
    pictures = []
    for title, fields in (
        ("First token, p50 to p95", ("ttft_p50_ms", "ttft_p95_ms")),
        ("Whole answer, p50 to p95", ("total_p50_ms", "total_p95_ms")),
    ):
        rows = []
        for t in lines:
            p50, p95 = (float(getattr(t, field)) for field in fields)
            rows.append(plots.Bar(t.system, family(t.system), p50, p50, p95, ms(p50)))
        scale = plots.Scale("ms", is_log=True)
        pictures.append(Picture(title, plots.bars(rows, scale, title)))
    columns = ("system", "first token p50, ms", "p95", "whole answer p50, ms", "p95", "all, s")
    table_rows = tuple(
        Row(
            (
                t.system,
                ms(t.ttft_p50_ms),
                ms(t.ttft_p95_ms),
                ms(t.total_p50_ms),
                ms(t.total_p95_ms),
                f"{t.seconds:.1f}",
                str(t.repeats),
            ),
            t.system in OURS,
        )
        for t in lines
    )
    fastest = sorted(lines, key=lambda t: t.ttft_p95_ms)
    ours = next((n for n, t in enumerate(fastest, 1) if t.system in OURS), None)
    own = f"; our best system is number {ours} of {len(lines)}" if ours else ""
    return Section(
        "traffic",
        "Traffic",
        f"With {lines[0].requests} requests arriving on the same schedule, {fastest[0].system} has"
        f" the lowest p95 of the first token, {ms(fastest[0].ttft_p95_ms)} ms{own}.",
        (Part(pictures=tuple(pictures), table=Table((*columns, "repeats"), table_rows)),),
        "A request's clock starts when it arrives, so queueing counts. p50 is the median, p95"
        f" the 95th percentile: of {lines[0].requests} requests, roughly the slowest one.",
        "The dot is the median, the end of the line the 95th percentile.",
    )


def noise(results: Results) -> Section | None:
    """Return the section on the baseline against itself."""
    lines = [m for m in results.measures if (m.system, m.baseline) == (AGAIN, "transformers")]
    if not lines:
        return None
    rows = tuple(
        Row((m.workload, m.phase, METRICS[m.metric], with_interval(m), str(m.pairs)))
        for m in sorted(lines, key=_measure_place)
    )
    pictures = []
    for metric, until in METRICS.items():
        own = sorted((m for m in lines if m.metric == metric), key=_measure_place)
        bars = [
            plots.Bar(
                f"{m.workload}, {m.phase}", "transformers", m.ratio, m.low, m.high, times(m.ratio)
            )
            for m in own
        ]
        if bars:
            scale = plots.Scale("generate() again, generate() = 1", is_log=True, mark=1.0)
            pictures.append(Picture(until.capitalize(), plots.bars(bars, scale, f"noise, {until}")))
    return Section(
        "noise",
        "Noise floor",
        _noise_takeaway(lines),
        (
            Part(
                pictures=tuple(pictures),
                table=Table(
                    ("workload", "phase", "until", "ratio (95% interval)", "pairs"),
                    rows,
                    "All figures",
                ),
            ),
        ),
        "The same program ran twice, as two systems. Intervals should contain 1.",
    )


def _noise_takeaway(lines: list[Measure]) -> str:
    said = []
    for where, is_pooled in (
        ("over all workloads together", True),
        ("on a single workload", False),
    ):
        own = [m for m in lines if (m.workload == POOLED) == is_pooled]
        if own:
            worst = max(own, key=lambda m: abs(m.ratio - 1.0))
            names = [*([] if is_pooled else [worst.workload]), worst.phase, METRICS[worst.metric]]
            said.append(f"up to {percent(abs(worst.ratio - 1.0))} {where} ({', '.join(names)})")
    return (
        f"The ratio of generate() to itself differs from 1 by {joined(said)}: smaller differences"
        " in this report mean nothing."
    )


def _measure_place(m: Measure) -> tuple[object, ...]:
    return (workload_place(m.workload), place(m.phase, PHASES), m.metric)
