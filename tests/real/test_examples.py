"""The examples as a user runs them, on a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.run import EXAMPLES

pytestmark = pytest.mark.model

RUN = Path(__file__).parents[2] / "examples" / "run.py"
FEW = {"KVBOOST_MAX_NEW_TOKENS": "8", "KVBOOST_DTYPE": "float32", "COLUMNS": "80"}


def test_examples_reuse_and_say_so_in_their_table(smol: str) -> None:
    command = [sys.executable, str(RUN), "--model", smol]
    env = os.environ | FEW
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    words = [line.split() for line in done.stdout.splitlines()]
    num_asked = 0
    for name in EXAMPLES:
        (row,) = (each for each in words if each[:1] == [name] and each[-2:-1] == ["of"])
        asked, reused, same = int(row[1]), int(row[3].rstrip("%")), int(row[-3])
        assert asked >= 3 and reused > 50
        assert same == asked or name == "rag"  # the one that moves text
        num_asked += asked + 1
    assert done.stdout.count("tokens reused, first token after") == num_asked
