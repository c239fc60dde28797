"""The README's picture: time to the first token by prompt length, as a file of its own."""

from pathlib import Path

from kvboost.bench.report import plots
from kvboost.bench.report.reading import read_results

_TITLE = (
    "Time to first token by prompt length: generate() grows fast, KVBoost with cached text slowly"
)
# An image in a page of somebody else's has no style sheet but its own.
_STYLE = """
:root { --ink: #1c1e21; --soft: #555b63; --grid: #e6e7e3; --paper: #fdfdfb;
  --bare: #6b7280; --warm: #c2410c; --moved: #1f5fa8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --soft: #a3aab4; --grid: #2a2e36;
  --paper: #14161a; --bare: #9ba3af; --warm: #ff8f4d; --moved: #6aaeff; } }
svg { font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; background: var(--paper); }
text { fill: var(--ink); } .tick, .axis { fill: var(--soft); font-size: 10px; }
.grid { stroke: var(--grid); } .stroke { fill: none; stroke-width: 1.8; }
.fill.bare { fill: var(--bare); } .stroke.bare { stroke: var(--bare); }
.fill.warm { fill: var(--warm); } .stroke.warm { stroke: var(--warm); }
.fill.moved { fill: var(--moved); } .stroke.moved { stroke: var(--moved); }
"""


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
    opening, rest = drawn.split(">", 1)
    named = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="560" ', 1)
    return f"{named}><style>{_STYLE}</style>{rest}\n"
