"""Sections on settings: modes, chunk sizes, chunking strategies, memory, hit rates."""

import math
from collections.abc import Sequence

from kvboost.bench.report.compared import RATIO, fastest, ratio_bar, slowest
from kvboost.bench.report.questions import TOP1
from kvboost.bench.report.reading import Line, Results, by_phase, grouped, known
from kvboost.bench.report.section import (
    Part,
    Picture,
    Section,
    counted,
    joined,
    percent,
    plain,
    table,
    times,
)
from kvboost.drawing import plots

_FOUND = "The found share is the share of the prompt found in the cache."


def modes(results: Results) -> Section | None:
    """Return the section on the modes of reuse."""
    rows = results.asked("modes", "mode", "ratio")
    if not rows:
        return None
    figures = table(rows, "mode", "phase", "ttft_ms", "total_ms", "bare_ms", "ratio")
    return Section(
        "modes",
        "Modes",
        f"{_best_sentence(rows, 'mode')}.",
        [Part(pictures=_bar_pictures(rows, "mode"), table=figures)],
        "off is our prefill without reuse; below 1, it is faster than generate() even so. exact"
        " reuses cached prefixes, auto also moved text; deterministic is slower and gives the same"
        f" bits each time. {TOP1}",
    )


def chunk(results: Results) -> Section | None:
    """Return the section on chunk sizes."""
    rows = results.asked("chunk", "chunk_size", "ratio")
    if not rows:
        return None
    best = fastest(rows)
    lines = _shaded(rows, "window", "window {}", "chunk_size", "ratio")
    x = plots.Scale("tokens of a chunk", is_log=True)
    y = plots.Scale("first token, generate() = 1")
    picture = Picture("First token by chunk size", plots.lines(lines, x, y, "chunk"))
    return Section(
        "chunk",
        "Chunk size and window",
        f"The fastest is a chunk of {plain(best['chunk_size'])} tokens"
        f" with window {plain(best['window'])}: {times(best['ratio'])} of generate()'s time"
        f"{_top1(best)}.",
        [
            Part(
                pictures=[picture],
                table=table(rows, "chunk_size", "window", "ttft_ms", "bare_ms", "ratio"),
            ),
        ],
        f"{_FOUND} {TOP1}",
    )


def chunking(results: Results) -> Section | None:
    """Return the section on the ways to cut a prompt."""
    rows = results.asked("chunking", "strategy", "found_share")
    if not rows:
        return None
    most = max(rows, key=lambda row: float(row["found_share"]))
    timed = known(rows, "ratio")
    said = f"{most['strategy']} finds the most, {percent(most['found_share'])}"
    figures = table(rows, "strategy", "found_share", "ratio", "top1")
    return Section(
        "chunking",
        "Chunking strategies",
        f"{_best_sentence(timed, 'strategy')}; {said}." if timed else f"{said}.",
        [Part(pictures=_bar_pictures(timed, "strategy"), table=figures)],
        f"{_FOUND} Strategies without a time are not part of the engine. {TOP1}",
    )


def memory(results: Results) -> Section | None:
    """Return the section on bytes, and on how often text must come back."""
    rows = results.asked("memory", "tokens", "bits")
    if not rows:
        return None
    paid = known(rows, "break_even_requests")
    lines = _shaded(paid, "bits", "{} bits", "tokens", "break_even_requests")
    x = plots.Scale("tokens stored", is_log=True)
    y = plots.Scale("hits until storing has paid", from_zero=True)
    title = "Hits needed to pay for storing"
    figures = table(
        rows, "bits", "tokens", "kv_bytes_per_token", "store_ms", "load_ms", "prefill_ms"
    )
    drawn = [Picture(title, plots.lines(lines, x, y, title))] if lines else []
    return Section(
        "memory",
        "Memory, and when storing pays",
        f"Storing {'; '.join(_pays(*each) for each in grouped(rows, 'bits').items())}.",
        [Part(pictures=drawn, table=figures)],
        "Storing is paid for once; each hit saves the difference between a cold and a warm first"
        f" token. Break-even is the number of hits after which storing has paid. {TOP1}",
    )


def _pays(bits: int, rows: Sequence[Line]) -> str:
    paid = known(rows, "break_even_requests")
    size = rows[-1].get("kv_bytes_per_token")
    room = f" ({size / 1024:,.1f} KiB per token)" if size is not None else ""
    if len(paid) < len(rows):
        return f"at {bits} bits does not always pay{room}"
    most = max(1, *(math.ceil(row["break_even_requests"]) for row in paid))
    return f"at {bits} bits pays after at most {counted(most, 'hit')}{room}"


def hits(results: Results) -> Section | None:
    """Return the section on hit rates of a store that is too small."""
    rows = results.asked("hits", "pattern", "cache_share", "hit_rate", "exact_hit_rate")
    if not rows:
        return None
    x, y = plots.Scale("cache size, % of all documents"), plots.Scale("hits, %", from_zero=True)
    patterns = [row["pattern"] for row in rows]
    pictures = []
    for pattern, own in grouped(rows, "pattern", patterns.index).items():
        series = [
            plots.Line(name, css, tuple((100 * r["cache_share"], 100 * r[field]) for r in own))
            for name, css, field in (
                ("exact and moved", "ours", "hit_rate"),
                ("exact only", "transformers", "exact_hit_rate"),
            )
        ]
        pictures.append(Picture(pattern, plots.lines(series, x, y, f"hits, {pattern}")))
    least = min(row["cache_share"] for row in rows)
    said = [f"{r['pattern']} {percent(r['hit_rate'])}" for r in rows if r["cache_share"] == least]
    figures = table(rows, "pattern", "cache_share", fold="All figures")
    return Section(
        "hits",
        "Hit rates of a cache that is too small",
        f"With a cache for {percent(least)} of the documents, hit rates are: {joined(said)}.",
        [Part(pictures=pictures, table=figures)],
        "Without a model: the real index and eviction, with requests for documents that are equally"
        " frequent (uniform), much more frequent for some (zipf), or repeated soon (temporal).",
    )


def _shaded(rows: Sequence[Line], name: str, label: str, x: str, y: str) -> list[plots.Line]:
    """Return a line of y over x for each value of a field."""
    return [
        plots.Line(label.format(value), f"shade{n % 4}", tuple((r[x], r[y]) for r in own))
        for n, (value, own) in enumerate(grouped(rows, name).items())
    ]


def _bar_pictures(rows: Sequence[Line], name: str) -> list[Picture]:
    over = [row["ratio"] for row in rows]
    made = []
    for phase, own in grouped(rows, "phase", by_phase).items():
        bars = [ratio_bar(row[name], "ours", row) for row in own]
        title = f"First token by {name}{f', {phase}' if phase else ''}"
        made.append(Picture(title, plots.bars(bars, RATIO, title, over)))
    return made


def _best_sentence(rows: Sequence[Line], name: str) -> str:
    said = []
    for phase, own in grouped(rows, "phase", by_phase).items():
        best, worst = fastest(own), slowest(own)
        sentence = f"{phase}: " if phase else ""
        sentence += f"{best[name]} is the fastest ({times(best['ratio'])}{_top1(best)})"
        if best is not worst:
            sentence += f", {worst[name]} the slowest ({times(worst['ratio'])}{_top1(worst)})"
        said.append(sentence)
    return f"First token, generate() = 1. {'; '.join(said)}"


def _top1(row: Line) -> str:
    return f", top-1 {percent(row['top1'])}" if row.get("top1") is not None else ""
