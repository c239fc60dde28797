"""The pictures of the docs are drawn from what was measured."""

from __future__ import annotations

from benchmarks.pictures import pictures


def test_the_docs_pictures_are_those_of_the_kept_results() -> None:
    other = [path.name for path, drawn in pictures().items() if path.read_text() != drawn]
    assert other == [], "python -m benchmarks.pictures"
