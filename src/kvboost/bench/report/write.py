"""Makes the report of a run from its results."""

from pathlib import Path

from kvboost.bench.report import about, asked, compared, running
from kvboost.bench.report.markdown import markdown
from kvboost.bench.report.page import page
from kvboost.bench.report.reading import Results, read_results
from kvboost.bench.report.section import Part, Section


def write_report(folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.md of the run in ``folder``; returns their paths.

    Reads results.jsonl and, if there is one, notes.md ("## title" and paragraphs), which is shown
    among what we lose.

    Raises:
        KVBoostError: There are no results.
    """
    results = read_results(folder / "results.jsonl")
    made = sections(results, read_notes(folder / "notes.md"))
    html, text = folder / "report.html", folder / "report.md"
    html.write_text(page(results, made), encoding="utf-8")
    text.write_text(markdown(results, made), encoding="utf-8")
    return html, text


def sections(results: Results, notes: list[Part]) -> list[Section]:
    """Return the sections for which there are results, in their order."""
    made = (
        about.measured(results),
        compared.headline(results),
        compared.workloads(results),
        compared.losses(results, notes),
        *asked.questions(results),
        running.stages(results),
        running.traffic(results),
        about.absent(results),
        about.reproduce(results),
    )
    return [section for section in made if section is not None]


def read_notes(path: Path) -> list[Part]:
    """Return a part for each "## title" of a Markdown file and the paragraphs below it."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = []
    for piece in f"\n{text}".split("\n## ")[1:]:
        title, _, body = piece.partition("\n")
        paragraphs = [" ".join(paragraph.split()) for paragraph in body.split("\n\n")]
        parts.append(Part(title=title.strip(), text=tuple(p for p in paragraphs if p)))
    return parts
