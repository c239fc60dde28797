"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_the_quick_start_runs_and_shows_reuse(
    smol: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in code
    monkeypatch.chdir(ROOT)
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", smol), {})
    shares = re.findall(
        r"(\d+)% of \d+ tokens reused, first token after \d+ ms", capsys.readouterr().out
    )
    assert len(shares) == 2
    assert int(shares[0]) == 0 and int(shares[1]) > 95


@pytest.mark.model
def test_the_part_on_documents_runs(
    smol: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = "from kvboost import KVBoost\n" + blocks[1]
    monkeypatch.chdir(ROOT)
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", smol), {})
    moved = re.findall(r"(\d+) moved", capsys.readouterr().out)
    assert len(moved) == 2
    assert all(int(count) > 500 for count in moved)


@pytest.mark.model
def test_the_part_on_restarts_runs_and_the_second_process_is_warm(
    smol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = "from kvboost import KVBoost\n" + blocks[2]
    monkeypatch.chdir(tmp_path)
    cached = []
    for _ in range(2):
        names: dict[str, object] = {}
        exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", smol), names)
        with names["engine"] as engine:
            cached.append(engine.generate("One, two, three, four, five. " * 20, 4).cached_tokens)
    assert cached[0] == 0 and cached[1] > 100
