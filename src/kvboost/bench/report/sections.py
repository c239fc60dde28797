"""The sections of the report, in their order."""

from pathlib import Path

from kvboost.bench.report import about, choices, compared, losses, questions, running
from kvboost.bench.report.reading import Results
from kvboost.bench.report.section import Part, Section


def sections(results: Results, notes: tuple[Part, ...]) -> list[Section]:
    """Return the sections for which there are results."""
    made = (
        about.measured(results),
        compared.headline(results),
        compared.workloads(results),
        losses.losses(results, notes),
        questions.frontier(results),
        questions.length(results),
        questions.share(results),
        running.stages(results),
        choices.modes(results),
        choices.chunk(results),
        choices.chunking(results),
        choices.memory(results),
        choices.hits(results),
        running.traffic(results),
        about.absent(results),
        running.noise(results),
        about.reproduce(results),
        about.clock(),
    )
    return [section for section in made if section is not None]


def read_notes(path: Path) -> tuple[Part, ...]:
    """Return a part for each "## title" of a Markdown file and the paragraphs below it."""
    if not path.is_file():
        return ()
    parts = []
    for piece in ("\n" + path.read_text(encoding="utf-8")).split("\n## ")[1:]:
        title, _, text = piece.partition("\n")
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        parts.append(Part(title=title.strip(), text=tuple(p for p in paragraphs if p)))
    return tuple(parts)
