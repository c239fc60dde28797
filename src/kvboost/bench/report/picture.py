"""The README's picture: time to the first token by prompt length, as a file of its own."""

from pathlib import Path

from kvboost.bench.report.reading import read_results
from kvboost.drawing import plots
from kvboost.drawing.standalone import standalone

_TITLE = (
    "Time to first token by prompt length: generate() grows fast, KVBoost with cached text slowly"
)
_COLOURS = {
    "bare": ("#6b7280", "#9ba3af"),
    "warm": ("#c2410c", "#ff8f4d"),
    "moved": ("#1f5fa8", "#6aaeff"),
}


def readme_picture(results: Path) -> str:
    """Return the drawing (SVG) of the question on length.

    Args:
        results: The file results.jsonl.
    """
    rows = read_results(results).asked("length")
    series = [
        plots.Line(
            name,
            css,
            tuple((r["tokens"], r[field] / 1000) for r in rows if r["phase"] == phase),
        )
        for name, css, phase, field in (
            ("generate()", "bare", "warm", "bare_ms"),
            ("KVBoost, cached prefix", "warm", "warm", "ours_ms"),
            ("KVBoost, moved documents (approximate)", "moved", "moved", "ours_ms"),
        )
    ]
    drawn = plots.lines(
        series,
        plots.Scale("prompt tokens", from_zero=True),
        plots.Scale("time to first token, seconds", from_zero=True),
        _TITLE,
    )
    return standalone(drawn, _COLOURS, 560)
