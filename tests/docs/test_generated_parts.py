"""What scripts write into the docs is what they would write now."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvboost
from make_diagrams import DRAWN, PICTURES
from make_docs import BENCHMARKS, CONCEPT, PAGES, REFERENCE, ROOT, generated, moved_quality
from reference import commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_of_the_docs_are_up_to_date(page: Path) -> None:
    assert page.read_text() == generated(page), "run scripts/make_docs.py"


@pytest.mark.parametrize(
    "page",
    [
        CONCEPT,
        BENCHMARKS,
        ROOT / "README.md",
        ROOT / "examples" / "rag.py",
        ROOT / "examples" / "rag.ipynb",
        ROOT / "benchmarks" / "report" / "report.md",
    ],
    ids=lambda page: page.name,
)
def test_moved_text_has_one_figure_everywhere(page: Path) -> None:
    words = page.read_text().replace('\\n",\n    "', " ")  # lines of a notebook
    assert moved_quality() in " ".join(words.split())


@pytest.mark.parametrize("name", DRAWN)
def test_diagrams_are_up_to_date(name: str) -> None:
    assert (PICTURES / name).read_text() == DRAWN[name](), "run scripts/make_diagrams.py"


def test_the_api_page_has_every_public_name() -> None:
    page = (REFERENCE / "api.md").read_text()
    assert [name for name in kvboost.__all__ if f":: kvboost.{name}\n" not in page] == []


def test_variables_of_the_reader_do_not_get_into_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = commands()
    monkeypatch.setenv("KVBOOST_MODEL", "mine")
    monkeypatch.setenv("KVBOOST_DTYPE", "float16")
    assert commands() == before
