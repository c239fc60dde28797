"""`kvboost explain`, as a user calls it; the model is tiny and made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvboost.models.load
from fakes import WordTokenizer
from kvboost.cli import main as cli
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny

DOCUMENT = " ".join(str(10 + number * 7 % 400) for number in range(150))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda *_: (build(*SUPPORTED["llama"]), WordTokenizer())  # noqa: E731
    monkeypatch.setattr(kvboost.models.load, "load", made)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "seen.txt").write_text(f"5 6 7 {DOCUMENT} 8 9")
    (tmp_path / "ask.txt").write_text(f"5 6 7 8 9 11 {DOCUMENT} 12 13 14")
    return str(tmp_path / "ask.txt"), str(tmp_path / "seen.txt")


def shown(files: tuple[str, str], capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    prompt, seen = files
    given = ["--raw", "--model", "tiny", "--seen", seen, "--reuse", "auto"]
    assert cli.main(["explain", prompt, *given, *flags]) == 0
    return capsys.readouterr().out


def test_json_has_every_span(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(shown(files, capsys, "--json"))
    assert [each["kind"] for each in report["spans"]] == ["miss", "moved", "miss"]
    assert report["spans"][1]["stop"] - report["spans"][1]["start"] == 150
    assert report["spans"][1]["reason"] == "3 tokens later than when it was computed"


def test_text_shows_the_spans_and_their_reasons(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(files, capsys)
    assert "3 tokens later than when it was computed" in text
    marks = [line.split("]")[0] for line in text.splitlines() if line.startswith("[")]
    assert marks == ["[miss", "[moved", "[miss"]  # captured, so there are no colours
    assert "159 tokens: exact 0%, moved 94%, miss 6%" in text
