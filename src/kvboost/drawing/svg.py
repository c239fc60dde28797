"""Pieces of SVG. Colours are classes of the page's style sheet, so drawings follow its mode."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from kvboost.drawing.axes import Axis, label

WIDTH = 360.0
ROW = 18.0
# The width of a letter at 11 pixels in the widest of the page's fonts, on average.
_LETTER = 6.5


def text_width(text: str) -> float:
    """Return the width that a text will have, roughly."""
    return _LETTER * len(text)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """Draw a line."""
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, css: str) -> str:
    """Draw a filled rectangle."""
    size = f'width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect class="fill {escape(css)}" x="{x:.1f}" y="{y:.1f}" {size}/>'


def dot(x: float, y: float, css: str, radius: float = 3.5) -> str:
    """Draw a filled circle."""
    return f'<circle class="fill {css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'


def words(x: float, y: float, text: str, css: str = "", anchor: str = "start") -> str:
    """Draw text; ``anchor`` is start, middle or end."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{css}" {place}>{escape(text)}</text>'


def path(points: Sequence[tuple[float, float]], css: str) -> str:
    """Draw a line through points."""
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="stroke {css}" points="{steps}"/>'


def x_axis(axis: Axis, top: float, bottom: float, title: str) -> list[str]:
    """Draw grid lines, numbers and the title of a horizontal axis."""
    widest = max(text_width(label(t)) for t in axis.tick_choices()[0])
    ticks = _apart(axis, widest)
    marks = [line(axis.at(t), top, axis.at(t), bottom, "grid") for t in ticks]
    marks += [words(axis.at(t), bottom + 13, label(t), "tick", "middle") for t in ticks]
    middle = (axis.start + axis.end) / 2
    return [*marks, words(middle, bottom + 28, _titled(axis, title), "axis", "middle")]


def y_axis(axis: Axis, left: float, right: float, title: str) -> list[str]:
    """Draw grid lines, numbers and the title (on top) of a vertical axis."""
    ticks = _apart(axis, 16)
    marks = [line(left, axis.at(t), right, axis.at(t), "grid") for t in ticks]
    marks += [words(left - 5, axis.at(t) + 4, label(t), "tick", "end") for t in ticks]
    return [*marks, words(2, 10, _titled(axis, title), "axis")]


def _titled(axis: Axis, title: str) -> str:
    return f"{title} (log scale)" if axis.is_log else title


def _apart(axis: Axis, least: float) -> list[float]:
    """Return as many ticks as have their numbers apart."""
    for ticks in axis.tick_choices():
        places = [axis.at(t) for t in ticks]
        if all(abs(b - a) >= least for a, b in pairwise(places)):
            break
    return ticks


def legend(entries: Iterable[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Draw keys of (text, class), as many a row as fit; also returns their height."""
    marks: list[str] = []
    x, y = 4.0, top + 10
    for text, css in entries:
        width = 16 + text_width(text) + 12
        if x > 4 and x + width > WIDTH:
            x, y = 4.0, y + 16
        marks += [box(x, y - 8, 10, 8, css), words(x + 15, y, text, "key")]
        x += width
    return marks, (y + 8 - top if marks else 0.0)


def drawing(marks: Iterable[str], height: float, title: str) -> str:
    """Return the whole drawing; ``title`` is what is read aloud instead of it."""
    view = f'viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}"'
    return f"<svg {view}>{''.join(marks)}</svg>"
