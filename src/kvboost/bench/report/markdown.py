"""Writes sections as Markdown, and the table of the README."""

from pathlib import Path

from kvboost.bench.report.compared import quality, time_cell
from kvboost.bench.report.reading import BASELINE, POOLED, Results, read_results
from kvboost.bench.report.section import NONE, Part, Section
from kvboost.bench.tables import table

README_SYSTEMS = ("kvboost-exact", "kvboost-auto", BASELINE, "transformers-prefix", "vllm")
README_PHASES = ("warm", "moved")


def markdown(results: Results, sections: list[Section]) -> str:
    """Return the report without its pictures."""
    head = [f"# KVBoost benchmark: {results.run['model']}", "The pictures are in report.html."]
    return "\n\n".join([*head, *map(_section, sections)]) + "\n"


def readme_sentence(results: Path) -> str:
    """Return the README's claim: the longest prompt measured, warm, beside `generate()`.

    Args:
        results: The file results.jsonl of a run of the question on length.
    """
    read = read_results(results)
    warm = [row for row in read.asked("length") if row["phase"] == "warm"]
    row = max(warm, key=lambda each: int(each["tokens"]))
    return (
        f"A second question about the same {row['tokens']:,}-token prompt: first token after "
        f"**{row['ours_ms'] / 1000:.1f} s instead of {row['bare_ms'] / 1000:.1f} s** "
        f"({read.run['model']} in {read.run['dtype']} on {read.run['machine']['cores']} CPU cores, "
        f"median of {row['pairs']} pairs, {row['cached_share']:.0%} of the prompt cached)."
    )


def readme_table(results: Path) -> str:
    """Return the README's table: five systems, times pooled over all workloads.

    Args:
        results: The file results.jsonl.
    """
    read = read_results(results)
    rows = []
    for system in [each for each in README_SYSTEMS if each in read.measured]:
        ratios = [time_cell(read, POOLED, phase, "ttft", system) for phase in README_PHASES]
        top1 = [quality(read, POOLED, phase, system) for phase in README_PHASES]
        shares = " / ".join(NONE if each is None else f"{100 * each:.1f} %" for each in top1)
        rows.append((read.title(system), *ratios, shares))
    columns = ("", "cached prefix", "moved documents", "top-1 agreement")
    return table(columns, rows)


def _section(section: Section) -> str:
    pieces = [f"## {section.title}", section.takeaway, *map(_part, section.parts), section.reading]
    return "\n\n".join(piece for piece in pieces if piece)


def _part(part: Part) -> str:
    """Return a part; nothing if it has only pictures."""
    pieces = [*part.text, f"```\n{part.code}\n```" if part.code else ""]
    if part.table:
        pieces += [
            f"{part.table.fold}:" if part.table.fold else "",
            table(part.table.columns, part.table.rows),
        ]
    shown = [piece for piece in pieces if piece]
    title = [f"### {part.title}"] if part.title and shown else []
    return "\n\n".join([*title, *shown])
