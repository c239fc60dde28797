"""The examples as a user runs them, on small models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.run import EXAMPLES
from tiny_models import save

RUN = Path(__file__).parents[2] / "examples" / "run.py"
FEW = {"KVBOOST_MAX_NEW_TOKENS": "8", "KVBOOST_DTYPE": "float32", "COLUMNS": "80"}


def run_and_check(model: str, *names: str) -> None:
    command = [sys.executable, str(RUN), "--model", model]
    command += ["--example", *names] if names else []
    env = os.environ | FEW
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    words = [line.split() for line in done.stdout.splitlines()]
    num_asked = 0
    for name in names or EXAMPLES:
        (row,) = (each for each in words if each[:1] == [name] and each[-2:-1] == ["of"])
        asked, reused, same = int(row[1]), int(row[3].rstrip("%")), int(row[-3])
        assert asked >= 3
        # The one that moves text, where it is worth it: on a tiny model it is not.
        assert reused > 50 or (name == "rag" and not names)
        assert same == asked or name == "rag"
        num_asked += asked + 1
    assert done.stdout.count("tokens reused, first token after") == num_asked


@pytest.mark.tiny
def test_examples_reuse_and_say_so_in_their_table(tmp_path: Path) -> None:
    run_and_check(save(tmp_path))


@pytest.mark.model
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.long] * (each != "rag")) for each in EXAMPLES]
)
def test_an_example_on_a_real_model(smol: str, name: str) -> None:
    run_and_check(smol, name)
