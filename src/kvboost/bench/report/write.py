"""Makes the report of a run from its results."""

from pathlib import Path

from kvboost.bench.report.markdown import markdown
from kvboost.bench.report.page import page
from kvboost.bench.report.reading import read_results
from kvboost.bench.report.sections import read_notes, sections


def write_report(folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.md of the run in ``folder``; returns their paths.

    Reads results.jsonl and, if there is one, notes.md ("## title" and paragraphs), which is shown
    among what we lose.

    Raises:
        KVBoostError: There are no results, or they are damaged.
    """
    results = read_results(folder / "results.jsonl")
    made = sections(results, read_notes(folder / "notes.md"))
    html, text = folder / "report.html", folder / "report.md"
    html.write_text(page(results, made), encoding="utf-8")
    text.write_text(markdown(results, made), encoding="utf-8")
    return html, text
