"""The commands that answer, on a model with trained weights."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost.cli.main import main

pytestmark = pytest.mark.model

HANDBOOK = "Rule {}: whoever borrows a boat brings it back before the sun sets on the river.\n"


def test_what_one_process_warms_another_reuses(smol: str, tmp_path: Path) -> None:
    handbook = tmp_path / "handbook.txt"
    handbook.write_text("".join(HANDBOOK.format(number) for number in range(8)))
    where = ["--model", smol, "--dtype", "float32", "--disk-cache-dir", str(tmp_path / "kv")]
    assert main(["warm", str(handbook), *where]) == 0
    ask = ["generate", "When must a boat be back?", "--max-new-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "kvboost", *ask, "--document", str(handbook), *where,
         "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["exact_tokens"] > 0.9 * answer["prompt_tokens"] > 100
    assert answer["text"].strip()


def test_a_conversation_and_its_check(
    smol: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model", smol, "--dtype", "float32"]
    said = "What is the capital of France?\nAnd of Spain?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert main(["chat", *model, "--max-new-tokens", "8", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert "Paris" in first["text"] and "Madrid" in second["text"]
    assert second["cached_tokens"] >= first["prompt_tokens"]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(HANDBOOK.format(1) * 2)
    assert main(["verify", str(prompt), *model, "--max-new-tokens", "4"]) == 0
    assert "correct: 1 of 1 answers the same" in capsys.readouterr().out
