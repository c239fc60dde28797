"""SECURITY.md names tests; they must be there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| threat"))
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_there_is_a_table_of_threats() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_what_is_said_to_be_tested_is(row: list[str]) -> None:
    named = NAMED.findall(row[2])
    assert named and len(named) == row[2].count("::")
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in tree.body if isinstance(node, functions)}, name
