"""The script that fetches the small model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import get_model


def test_missing_packages_are_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBOOST_MODEL_DIR", str(tmp_path))
    monkeypatch.setattr(get_model.subprocess, "run", lambda *_, **__: pytest.fail("a download"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert get_model.main() == 1
    assert capsys.readouterr().err == "get_model.py needs gguf: pip install gguf\n"
    assert not list(tmp_path.iterdir())
