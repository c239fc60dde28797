"""The notebook runs from top to bottom, and shows what its text says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest

from make_notebook import NOTEBOOK, run

SRC = Path(__file__).parents[2] / "src"
MOST_BYTES = 300_000
WHOLE_PAGES, SHORT_PAGES = "topics[name][:800]", "topics[name][:250]"


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    return "".join(each.get("text", "") for each in outputs)


def shares_of(text: str) -> dict[str, int]:
    """Percents of the prompts that were reused, by mode."""
    return {mode: int(share) for mode, share in re.findall(r"(\w+) +median.* (\d+)% of", text)}


def check(text: str) -> None:
    shares = shares_of(text)
    # Whether moved text is worth it is decided by the pace of the machine.
    assert shares["off"] == 0 < shares["exact"] <= shares["auto"]
    assert "computed again" in text
    exact, auto = text.split("reuse='auto'")
    kl = [float(each) for each in re.findall(r"mean KL ([\d.]+)", exact.split("reuse='exact'")[1])]
    assert len(kl) == 3 and max(kl) < 1e-6
    assert "mean KL" in auto


def test_the_committed_notebook_has_the_outputs_of_a_run() -> None:
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    text = printed(notebook)
    check(text)
    assert shares_of(text)["exact"] < shares_of(text)["auto"]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert NOTEBOOK.read_text().count('"image/png"') == 2
    assert '"stderr"' not in NOTEBOOK.read_text()  # paths of the machine that it was run on


@pytest.fixture
def model(smol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_MODEL", smol)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.model
@pytest.mark.long
@pytest.mark.usefixtures("model")
def test_the_notebook_runs_from_top_to_bottom_on_shorter_pages(tmp_path: Path) -> None:
    source = NOTEBOOK.read_text()
    assert source.count(WHOLE_PAGES) == 1
    shorter = tmp_path / NOTEBOOK.name
    shorter.write_text(source.replace(WHOLE_PAGES, SHORT_PAGES))
    check(printed(run(shorter)))


@pytest.mark.model
@pytest.mark.long
@pytest.mark.usefixtures("model")
def test_the_notebook_runs_from_top_to_bottom() -> None:
    check(printed(run(NOTEBOOK)))
