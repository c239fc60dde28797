"""Sections on settings: modes, chunk sizes, chunking strategies, memory, hit rates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.bench.report import plots
from kvboost.bench.report.compared import RATIO
from kvboost.bench.report.fields import TOP1, drop_empty, table, values
from kvboost.bench.report.formats import counted, joined, percent, plain, times
from kvboost.bench.report.reading import Results
from kvboost.bench.report.section import Part, Picture, Section

_Rows = Sequence[Mapping[str, Any]]
_FOUND = "The found share is the share of the prompt found in the cache."
_MEMORY = ("bits", "tokens", "kv_bytes_per_token", "store_ms", "load_ms", "prefill_ms")


def modes(results: Results) -> Section | None:
    """Return the section on the modes of reuse."""
    rows = drop_empty(results.asked("modes"), "mode", "ratio")
    if not rows:
        return None
    return Section(
        "modes",
        "Modes",
        f"{_best_sentence(rows, 'mode')}.",
        (
            Part(
                pictures=_bar_pictures(rows, "mode", "First token by mode"),
                table=table(rows, "mode", "phase", "ttft_ms", "total_ms", "bare_ms", "ratio"),
            ),
        ),
        "off is our prefill without reuse; below 1, it is faster than generate() even so. exact"
        " reuses cached prefixes, auto also moved text; deterministic is slower and gives the same"
        f" bits each time. {TOP1}",
    )


def chunk(results: Results) -> Section | None:
    """Return the section on chunk sizes."""
    rows = drop_empty(results.asked("chunk"), "chunk_size", "ratio")
    if not rows:
        return None
    best = min(rows, key=lambda row: row["ratio"])
    groups = values(rows, "window") if all(row.get("window") is not None for row in rows) else []
    lines = [
        plots.Line(f"window {plain(window)}", f"shade{number % 4}", _sizes(rows, window))
        for number, window in enumerate(groups)
    ] or [plots.Line("kvboost", "ours", _sizes(rows, None))]
    x = plots.Scale("tokens of a chunk", is_log=True)
    y = plots.Scale("first token, generate() = 1")
    return Section(
        "chunk",
        "Chunk size and window",
        f"The fastest is a chunk of {plain(best['chunk_size'])} tokens"
        f"{_window(best)}: {times(best['ratio'])} of generate()'s time{_top1(best)}.",
        (
            Part(
                pictures=(Picture("First token by chunk size", plots.lines(lines, x, y, "chunk")),),
                table=table(rows, "chunk_size", "window", "ttft_ms", "bare_ms", "ratio"),
            ),
        ),
        f"{_FOUND} {TOP1}",
    )


def chunking(results: Results) -> Section | None:
    """Return the section on the ways to cut a prompt."""
    rows = drop_empty(results.asked("chunking"), "strategy", "found_share")
    if not rows:
        return None
    most = max(rows, key=lambda row: float(row["found_share"]))
    timed = drop_empty(rows, "ratio")
    said = f"{most['strategy']} finds the most, {percent(most['found_share'])}"
    return Section(
        "chunking",
        "Chunking strategies",
        f"{_best_sentence(timed, 'strategy')}; {said}." if timed else f"{said}.",
        (
            Part(
                pictures=_bar_pictures(timed, "strategy", "First token by strategy"),
                table=table(rows, "strategy", "found_share", "ratio", "top1"),
            ),
        ),
        f"{_FOUND} Strategies without a time are not part of the engine. {TOP1}",
    )


def memory(results: Results) -> Section | None:
    """Return the section on bytes, and on how often text must come back."""
    rows = drop_empty(results.asked("memory"), "tokens", "bits")
    if not rows:
        return None
    bits = values(rows, "bits")
    paid = drop_empty(rows, "break_even_requests")
    lines = [
        plots.Line(
            f"{b} bits",
            f"shade{number % 4}",
            tuple((r["tokens"], r["break_even_requests"]) for r in paid if r["bits"] == b),
        )
        for number, b in enumerate(values(paid, "bits"))
    ]
    x = plots.Scale("tokens stored", is_log=True)
    y = plots.Scale("hits until storing has paid", from_zero=True)
    title = "Hits needed to pay for storing"
    drawn = (Picture(title, plots.lines(lines, x, y, title)),) if lines else ()
    return Section(
        "memory",
        "Memory, and when storing pays",
        _memory_takeaway(rows, bits),
        (
            Part(
                pictures=drawn,
                table=table(rows, *_MEMORY),
            ),
        ),
        "Storing is paid for once; each hit saves the difference between a cold and a warm first"
        f" token. Break-even is the number of hits after which storing has paid. {TOP1}",
    )


def hits(results: Results) -> Section | None:
    """Return the section on hit rates of a store that is too small."""
    rows = drop_empty(results.asked("hits"), "pattern", "cache_share", "hit_rate")
    if not rows:
        return None
    pictures = []
    for pattern in dict.fromkeys(str(row["pattern"]) for row in rows):
        own = [row for row in rows if row["pattern"] == pattern]
        series = [
            plots.Line(name, css, tuple((100 * r["cache_share"], 100 * r[field]) for r in known))
            for name, css, field in (
                ("exact and moved", "ours", "hit_rate"),
                ("exact only", "transformers", "exact_hit_rate"),
            )
            if (known := drop_empty(own, field))
        ]
        x, y = plots.Scale("cache size, % of all documents"), plots.Scale("hits, %", from_zero=True)
        pictures.append(Picture(pattern, plots.lines(series, x, y, f"hits, {pattern}")))
    return Section(
        "hits",
        "Hit rates of a cache that is too small",
        _hits_takeaway(rows),
        (
            Part(
                pictures=tuple(pictures),
                table=table(rows, "pattern", "cache_share", fold="All figures"),
            ),
        ),
        "Without a model: the real index and eviction, with requests for documents that are equally"
        " frequent (uniform), much more frequent for some (zipf), or repeated soon (temporal).",
    )


def _bar_pictures(rows: _Rows, name: str, title: str) -> tuple[Picture, ...]:
    over = [row["ratio"] for row in rows]
    made = []
    for phase in dict.fromkeys(row.get("phase") for row in rows):
        own = [row for row in rows if row.get("phase") == phase]
        bars = [
            plots.Bar(str(row[name]), "ours", row["ratio"], None, None, times(row["ratio"]))
            for row in own
        ]
        full = f"{title}, {phase}" if phase else title
        made.append(Picture(full, plots.bars(bars, RATIO, full, over)))
    return tuple(made)


def _best_sentence(rows: _Rows, name: str) -> str:
    said = []
    for phase in dict.fromkeys(row.get("phase") for row in rows):
        own = [row for row in rows if row.get("phase") == phase]
        best, worst = min(own, key=_ratio), max(own, key=_ratio)
        sentence = f"{phase}: " if phase else ""
        sentence += f"{best[name]} is the fastest ({times(best['ratio'])}{_top1(best)})"
        if best is not worst:
            sentence += f", {worst[name]} the slowest ({times(worst['ratio'])}{_top1(worst)})"
        said.append(sentence)
    return f"First token, generate() = 1. {'; '.join(said)}"


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["ratio"])


def _top1(row: Mapping[str, Any]) -> str:
    return f", top-1 {percent(row['top1'])}" if row.get("top1") is not None else ""


def _window(row: Mapping[str, Any]) -> str:
    return f" with window {plain(row['window'])}" if row.get("window") is not None else ""


def _sizes(rows: _Rows, window: Any) -> tuple[tuple[float, float], ...]:
    return tuple((r["chunk_size"], r["ratio"]) for r in rows if r.get("window") == window)


def _memory_takeaway(rows: _Rows, bits: list[Any]) -> str:
    said = []
    for b in bits:
        own = [row for row in rows if row["bits"] == b]
        paid = drop_empty(own, "break_even_requests")
        size = own[-1].get("kv_bytes_per_token")
        room = f" ({size / 1024:,.1f} KiB per token)" if size is not None else ""
        if len(paid) < len(own):
            said.append(f"at {b} bits does not always pay{room}")
            continue
        most = max(1, *(math.ceil(row["break_even_requests"]) for row in paid))
        said.append(f"at {b} bits pays after at most {counted(most, 'hit')}{room}")
    return f"Storing {'; '.join(said)}."


def _hits_takeaway(rows: _Rows) -> str:
    least = min(row["cache_share"] for row in rows)
    said = [
        f"{row['pattern']} {percent(row['hit_rate'])}"
        for row in rows
        if row["cache_share"] == least
    ]
    return f"With a cache for {percent(least)} of the documents, hit rates are: {joined(said)}."
