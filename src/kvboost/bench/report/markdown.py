"""Writes sections as Markdown, and the table of the README."""

from pathlib import Path

from kvboost.bench.report.compared import quality, time_cell
from kvboost.bench.report.formats import percent
from kvboost.bench.report.names import AGAIN, POOLED
from kvboost.bench.report.reading import Results, read_results
from kvboost.bench.report.section import Part, Row, Section, Table


def markdown(results: Results, sections: list[Section]) -> str:
    """Return the report without its pictures."""
    return (
        "\n\n".join([f"# KVBoost benchmark: {results.run.model}", *map(_section, sections)]) + "\n"
    )


def readme_table(results: Path) -> str:
    """Return the README's table: systems against times pooled over all workloads.

    Args:
        results: The file results.jsonl.
    """
    read = read_results(results)
    asked = (
        ("warm", "ttft", "first token, warm"),
        ("moved", "ttft", "first token, moved"),
        ("cold", "ttft", "first token, cold"),
        ("warm", "total", "whole answer, warm"),
    )
    columns = ("ms (ratio to generate())", *(title for _, _, title in asked))
    rows = []
    for system in read.measured:
        if system == AGAIN:
            continue
        times = [time_cell(read, POOLED, phase, metric, system) for phase, metric, _ in asked]
        top1 = [percent(quality(read, POOLED, phase, system)) for phase in ("warm", "moved")]
        rows.append(Row((read.title(system), *times, *top1)))
    return _table(Table((*columns, "top-1, warm", "top-1, moved"), tuple(rows)))


def _section(section: Section) -> str:
    pieces = [f"## {section.title}", section.takeaway, *map(_part, section.parts), section.reading]
    return "\n\n".join(piece for piece in pieces if piece)


def _part(part: Part) -> str:
    pieces = [f"### {part.title}" if part.title else "", *part.text]
    pieces.append(f"```\n{part.code}\n```" if part.code else "")
    pieces.append(_table(part.table) if part.table else "")
    return "\n\n".join(piece for piece in pieces if piece)


def _table(table: Table) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *(row.cells for row in table.rows)]
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
