"""Plots: rows with intervals, lines, named points, stacked rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvboost.drawing import svg
from kvboost.drawing.axes import Axis, fitted
from kvboost.drawing.svg import ROW, WIDTH

_RIGHT = WIDTH - 8
_LEFT = 46.0
_FOOT = 34.0
_BESIDE = 10.0  # a name farther off has a line to its point
_Place = tuple[float, float]
_Box = tuple[float, float, float, float]  # left, upper, right, lower


@dataclass(frozen=True)
class Bar:
    """A named value with an interval, and the text beside it."""

    label: str
    css: str
    value: float
    low: float | None
    high: float | None
    text: str

    @property
    def ends(self) -> list[float]:
        """All that must lie on the axis."""
        return [v for v in (self.value, self.low, self.high) if v is not None]


@dataclass(frozen=True)
class Line:
    """A named line through points."""

    label: str
    css: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Point:
    """A named point."""

    label: str
    css: str
    x: float
    y: float


@dataclass(frozen=True)
class Stack:
    """A named row of (class, length) one after another, and the text beside it."""

    label: str
    pieces: tuple[tuple[str, float], ...]
    text: str


@dataclass(frozen=True)
class Scale:
    """An axis to be: its title, whether it is logarithmic, a value that gets a line of its own."""

    title: str
    is_log: bool = False
    mark: float | None = None
    from_zero: bool = False


def _scaled(values: Sequence[float], scale: Scale, start: float, end: float) -> Axis:
    marked = [*values] if scale.mark is None else [*values, scale.mark]
    return fitted(marked, start, end, is_log=scale.is_log, from_zero=scale.from_zero)


def bars(rows: Sequence[Bar], scale: Scale, title: str, over: Sequence[float] = ()) -> str:
    """Draw a row for each value, its interval over it.

    With a marked value rows are bars from it, else they are dots. ``over`` has values of
    neighbouring drawings, which get the same axis that way.
    """
    left = 8 + max(svg.text_width(row.label) for row in rows)
    right = _RIGHT - max(svg.text_width(row.text) for row in rows) - 6
    axis = _scaled([*(v for row in rows for v in row.ends), *over], scale, left, right)
    bottom = ROW * len(rows) + 6
    marks = svg.x_axis(axis, 2, bottom, scale.title)
    for number, row in enumerate(rows):
        marks += _bar(row, axis, scale.mark, 4 + ROW * number)
    if scale.mark is not None:
        marks.append(svg.line(axis.at(scale.mark), 2, axis.at(scale.mark), bottom, "mark"))
    return svg.drawing(marks, bottom + _FOOT, title)


def _bar(row: Bar, axis: Axis, mark: float | None, top: float) -> list[str]:
    middle = top + ROW / 2
    at = axis.at(row.value)
    marks = [
        svg.words(2, middle + 4, row.label, f"name {row.css}"),
        svg.words(_RIGHT, middle + 4, row.text, f"value {row.css}", "end"),
    ]
    if mark is not None:
        base = axis.at(mark)
        marks.append(svg.box(min(base, at), top + 3, abs(at - base), ROW - 6, row.css))
    if row.low is not None and row.high is not None:
        low, high = axis.at(row.low), axis.at(row.high)
        css = "whisker" if mark is not None else f"stroke {row.css}"
        marks.append(svg.line(low, middle, high, middle, css))
        marks += [svg.line(x, middle - 3, x, middle + 3, css) for x in (low, high)]
    if mark is None:
        marks.append(svg.dot(at, middle, row.css))
    return marks


def lines(
    series: Sequence[Line],
    x: Scale,
    y: Scale,
    title: str,
    over: Sequence[float] = (),
    *,
    has_dots: bool = True,
) -> str:
    """Draw lines, with a dot at each point, and a legend above them; ``over`` as in `bars`."""
    keys, height = svg.legend([(s.label, s.css) for s in series], 16)
    top, bottom = 24 + height, 196 + height
    x_axis = _scaled([p[0] for s in series for p in s.points], x, _LEFT, _RIGHT - 8)
    y_axis = _scaled([*over, *(p[1] for s in series for p in s.points)], y, bottom, top)
    marks = svg.x_axis(x_axis, top, bottom, x.title)
    marks += svg.y_axis(y_axis, x_axis.start, x_axis.end, y.title) + keys
    if y.mark is not None:
        level = y_axis.at(y.mark)
        marks.append(svg.line(x_axis.start, level, x_axis.end, level, "mark"))
    for one in series:
        places = [(x_axis.at(a), y_axis.at(b)) for a, b in sorted(one.points)]
        marks.append(svg.path(places, one.css))
        marks += [svg.dot(a, b, one.css, 3) for a, b in places if has_dots]
    return svg.drawing(marks, bottom + _FOOT, title)


def points(
    named: Sequence[Point],
    x: Scale,
    y: Scale,
    title: str,
    *,
    keys: Sequence[tuple[str, str]] = (),
    is_joined: bool = False,
) -> str:
    """Draw points, joined by a line or not, with their names where they hide nothing.

    ``keys`` are (text, class) of a legend below.
    """
    top, bottom = 18.0, 258.0
    # Points at the end of an axis must not lie on its frame.
    x_axis = _scaled([p.x for p in named], x, _LEFT + 10, _RIGHT - 18)
    y_axis = _scaled([p.y for p in named], y, bottom - 10, top + 10)
    marks = svg.x_axis(x_axis, top, bottom, x.title)
    marks += svg.y_axis(y_axis, _LEFT, _RIGHT - 8, y.title)
    places = [(x_axis.at(p.x), y_axis.at(p.y)) for p in named]
    taken = [(a - 4, b - 4, a + 4, b + 4) for a, b in places]
    if is_joined:
        marks.append(svg.path(places, named[0].css))
        taken += _along(places)
    marks += [svg.dot(a, b, p.css, 4) for (a, b), p in zip(places, named, strict=True)]
    frame = (_LEFT, top, WIDTH, bottom)
    entries, height = svg.legend(keys, bottom + _FOOT + 4)
    marks += [*_names(named, places, taken, frame), *entries]
    return svg.drawing(marks, bottom + _FOOT + height + 4, title)


def _along(places: Sequence[_Place]) -> list[_Box]:
    steps = [n / 12 for n in range(13)]
    on = [(a + t * (c - a), b + t * (d - b)) for (a, b), (c, d) in pairwise(places) for t in steps]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in on]


def _names(
    named: Sequence[Point], places: Sequence[_Place], taken: list[_Box], frame: _Box
) -> list[str]:
    marks = []
    for point, at in zip(named, places, strict=True):
        boxes = _choices(at, svg.text_width(point.label))
        inside = [box for box in boxes if _is_inside(box, frame)] or boxes
        free = (box for box in inside if not any(_overlap(box, other) for other in taken))
        box = next(free, inside[0])
        taken.append(box)
        distance, x, y = _nearest(box, at)
        if distance > _BESIDE:
            marks.append(svg.line(*at, x, y, "leader"))
        marks.append(svg.words(box[0], box[3] - 2, point.label, f"name {point.css}"))
    return marks


def _choices(at: _Place, width: float) -> list[_Box]:
    """Return places for the name of a point, the nearest first."""
    a, b = at
    sides = [a - width / 2, a + 6, a + 16, a - 6 - width, a - 16 - width]
    boxes = [(x, b + 11 * n - 6, x + width, b + 11 * n + 6) for n in range(-12, 13) for x in sides]
    return sorted(boxes, key=lambda box: _nearest(box, at)[0])


def _nearest(box: _Box, at: _Place) -> tuple[float, float, float]:
    """Return how far a box is from a place, and its point that is nearest."""
    x, y = min(max(at[0], box[0]), box[2]), min(max(at[1], box[1]), box[3])
    return abs(x - at[0]) + abs(y - at[1]), x, y


def _is_inside(box: _Box, frame: _Box) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _overlap(one: _Box, two: _Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def stacks(rows: Sequence[Stack], keys: Sequence[tuple[str, str]], scale: Scale, title: str) -> str:
    """Draw rows of pieces that follow each other, and a legend above them."""
    marks, height = svg.legend(keys, 0)
    left = 8 + max(svg.text_width(row.label) for row in rows)
    right = _RIGHT - max(svg.text_width(row.text) for row in rows) - 6
    lengths = [sum(length for _, length in row.pieces) for row in rows]
    axis = _scaled(lengths, scale, left, right)
    bottom = height + ROW * len(rows) + 6
    marks += svg.x_axis(axis, height + 2, bottom, scale.title)
    for number, row in enumerate(rows):
        top = height + 4 + ROW * number
        marks.append(svg.words(2, top + ROW / 2 + 4, row.label, "name"))
        marks.append(svg.words(_RIGHT, top + ROW / 2 + 4, row.text, "value", "end"))
        done = 0.0
        for css, length in row.pieces:
            start, done = axis.at(done), done + length
            marks.append(svg.box(start, top + 3, axis.at(done) - start, ROW - 6, css))
    return svg.drawing(marks, bottom + _FOOT, title)
