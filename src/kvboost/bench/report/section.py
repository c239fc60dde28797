"""What a section of the report is made of, whichever file it is written to; numbers in words."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.drawing import plots

Cells = tuple[str, ...]
NONE = "\N{EN DASH}"

# Every row of a question carries these; the section "Reproduce" shows them once.
_PROVENANCE = ("kind", "question", "model", "dtype", "seed", "machine", "versions", "commit")
_TITLES = {
    "ours_ms": "kvboost, ms",
    "bare_ms": "generate(), ms",
    "full_ms": "full prefill, ms",
    "ttft_ms": "first token, ms",
    "total_ms": "whole answer, ms",
    "store_ms": "store, ms",
    "load_ms": "load, ms",
    "prefill_ms": "prefill, ms",
    "top1": "top-1",
    "kl": "KL, nats",
    "kv_bytes_per_token": "K/V bytes per token",
    "stored_bytes_per_token": "stored bytes per token",
    "break_even_requests": "break-even requests",
    "exact_hit_rate": "exact hits",
    "hit_rate": "hits",
    "chunk_size": "chunk",
}


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: Their titles.
        rows: Their cells.
        fold: The line under which a page hides it, empty for a table that is shown.
        marked: First cells of the rows that stand out.
    """

    columns: Cells
    rows: Sequence[Cells]
    fold: str = ""
    marked: Collection[str] = ()


@dataclass(frozen=True)
class Picture:
    """A drawing (SVG) and its title."""

    title: str
    svg: str


@dataclass(frozen=True)
class Part:
    """A piece of a section: text, pictures side by side, a table, in this order."""

    title: str = ""
    text: tuple[str, ...] = ()
    code: str = ""
    pictures: Sequence[Picture] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        slug: Its address in the page.
        title: Its heading.
        takeaway: What it answers, in a sentence or two.
        parts: What is shown.
        reading: How to read it.
        drawn: How to read its pictures, for files that have them.
    """

    slug: str
    title: str
    takeaway: str
    parts: Sequence[Part]
    reading: str = ""
    drawn: str = ""


def table(rows: Sequence[Mapping[str, Any]], *first: str, fold: str = "") -> Table:
    """Return all fields of a question's rows as a table, the named ones in front."""
    shown = dict.fromkeys(name for name in first if any(name in row for row in rows))
    for row in rows:
        shown |= dict.fromkeys(
            name
            for name, value in row.items()
            if name not in _PROVENANCE and (value is None or isinstance(value, (str, int, float)))
        )
    titles = tuple(_TITLES.get(name, name.replace("_", " ")) for name in shown)
    return Table(titles, [tuple(_cell(n, row.get(n)) for n in shown) for row in rows], fold)


def _cell(name: str, value: Any) -> str:
    if name.endswith("_ms"):
        return ms(value)
    if name in ("ratio", "break_even_requests"):
        return times(value)
    if name == "kl":
        return NONE if value is None else f"{value:.3f}"
    if name == "top1" or name.endswith(("share", "_rate")):
        return percent(value)
    return plain(value)


def ms(value: float | None) -> str:
    """Write milliseconds without their unit."""
    return _rounded(value, tenths_from=1)


def times(value: float | None) -> str:
    """Write a ratio."""
    return _rounded(value, tenths_from=10)


def _rounded(value: float | None, tenths_from: float) -> str:
    if value is None:
        return NONE
    digits = 0 if value >= 100 else 1 if value >= tenths_from else 2
    return f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Write a share of one as percent."""
    return NONE if value is None else f"{100 * value:.1f}%"


def between(low: float | None, high: float | None) -> str:
    """Write an interval."""
    return NONE if low is None or high is None else f"{times(low)} to {times(high)}"


def ratio_bar(label: str, css: str, row: Mapping[str, Any]) -> plots.Bar:
    """Return the bar of a ratio, with its interval if there is one."""
    ratio = row["ratio"]
    return plots.Bar(label, css, ratio, row.get("low"), row.get("high"), times(ratio))


def counted(number: int, noun: str) -> str:
    """Write how many there are of something."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plain(value: Any) -> str:
    """Write a value of unknown kind."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
