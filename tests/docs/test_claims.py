"""Pages that list what the code supports, or quote a result, agree with it."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from pages import DOCS, ROOT
from tiny_models import REFUSED, SUPPORTED

MODELS = (DOCS / "models.md").read_text()
HOME = (DOCS / "index.md").read_text()
TOCTREE = re.compile(r"```\{toctree\}\n:hidden:\n:caption: (\w+)\n\n(.+?)```", re.DOTALL)
MOST = {"Guides": 9, "Concepts": 8}


def rows(heading: str) -> dict[str, str]:
    """The rows of the table below a heading, by the name in their first column."""
    section = MODELS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|(.+)\|$", section, re.MULTILINE))


def test_the_page_of_models_lists_what_is_certified() -> None:
    certified = defaultdict(set)
    for name, (model_type, _) in SUPPORTED.items():
        certified[model_type].add(name)
    listed = rows("Certified architectures")
    assert {each: {*re.findall(r"`([^`]+)`", row)} for each, row in listed.items()} == certified


def test_the_page_of_models_lists_what_is_refused_and_why() -> None:
    listed = rows("Refused")
    assert {*listed} == {model_type for model_type, _, _ in REFUSED.values()}
    for model_type, _, reason in REFUSED.values():
        assert reason in listed[model_type]


def test_the_number_of_architectures_is_counted() -> None:
    number = len({model_type for model_type, _ in SUPPORTED.values()})
    assert f"[{number} architectures](models.md)" in HOME


def test_the_figure_on_the_home_page_is_that_of_the_report() -> None:
    report = (ROOT / "benchmarks/report/report.md").read_text()
    (row,) = re.findall(r"^\| warm \| 2,048 \| ([\d,]+) \| ([\d,]+) \|.*\| (\d+) \|$", report, re.M)
    ours, full, pairs = (int(each.replace(",", "")) for each in row)
    assert f"**{ours / 1000:.1f} s instead of {full / 1000:.1f} s**" in HOME
    assert f"medians of {pairs} paired runs" in HOME


@pytest.mark.parametrize("caption", MOST)
def test_the_sidebar_stays_short(caption: str) -> None:
    entries = dict(TOCTREE.findall(HOME))[caption].split()
    assert 0 < len(entries) <= MOST[caption]
