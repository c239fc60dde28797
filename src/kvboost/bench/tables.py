"""Tables in Markdown: of the report, the docs and their reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Titles of columns, and the cells of each row."""
    lines = [columns, ["---"] * len(columns), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(head: str, line: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """The same of dictionaries: titles, and formats of the cells, each divided by ` | `."""
    forms = line.split(" | ")
    return table(head.split(" | "), [[form.format(**row) for form in forms] for row in rows])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
