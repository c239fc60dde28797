"""What a section of the report is made of, whichever file it is written to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    cells: tuple[str, ...]
    is_ours: bool = False


@dataclass(frozen=True)
class Table:
    """A table; ``fold`` is the line under which a page hides it, empty for one that is shown."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    fold: str = ""


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
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        slug: Its address in the page.
        title: Its heading.
        takeaway: One sentence or two, computed from the data.
        parts: What is shown.
        reading: How to read it.
        drawn: How to read its pictures, for files that have them.
    """

    slug: str
    title: str
    takeaway: str
    parts: tuple[Part, ...]
    reading: str = ""
    drawn: str = ""
