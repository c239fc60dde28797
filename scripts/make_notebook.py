"""Run examples/rag.ipynb from top to bottom and keep what it prints and draws.

KVBOOST_MODEL names the model; pip install nbclient ipykernel '.[bench]'
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "rag.ipynb"
PATIENCE_S = 900  # for one cell, on a busy machine


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook as a run leaves it, without what differs between machines but for its figures.

    That is the times at which cells ran, and what libraries say on standard error.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3").execute(cwd=path.parent)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}  # else this machine's Python
    return notebook


if __name__ == "__main__":
    nbformat.write(run(NOTEBOOK), NOTEBOOK)
