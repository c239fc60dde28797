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
    (code,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in code
    monkeypatch.chdir(ROOT)
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", smol), {})
    shares = re.findall(
        r"(\d+)% of \d+ tokens reused, first token after \d+ ms", capsys.readouterr().out
    )
    assert len(shares) == 2
    assert int(shares[0]) == 0 and int(shares[1]) > 95
