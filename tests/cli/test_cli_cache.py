"""`kvboost cache`, as an operator calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.cli.main import main
from kvboost.tiers.disk.tier import DiskTier
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk tier of an engine that has ended."""
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))
    host = build(*SUPPORTED["llama"])
    host.config._name_or_path = "models/tiny-llama"
    options = {"chunk_size": 16, "disk_cache_dir": str(tmp_path / "kv"), "max_disk_bytes": 2**22}
    with KVBoost(host, WordTokenizer(), **options) as engine:
        for tenant in ("a", "b"):
            engine.generate(words(100), 2, tenant=tenant)
    return tmp_path / "kv"


def test_ls_counts_by_namespace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", folder.as_uri(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in rows] == [101, 101]
    assert {row["codec"] for row in rows} == {"raw"}
    assert {row["model"] for row in rows} == {"models/tiny-llama"}
    assert main(["cache", "ls", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "14 chunks, " in shown and shown.count("models/tiny-llama") == 2


def test_verify_and_gc_find_what_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "verify", str(folder)]) == 0
    assert "14 chunks, 0 damaged" in capsys.readouterr().out
    segment = max(folder.glob("segment-*.kv"), key=lambda path: path.read_bytes().count(b"KVBF"))
    spoiled = bytearray(segment.read_bytes())
    spoiled[spoiled.index(b"KVBF") + 500] ^= 1
    segment.write_bytes(spoiled)
    assert main(["cache", "verify", str(folder)]) == 1
    assert "14 chunks, 1 damaged" in capsys.readouterr().out
    assert main(["cache", "gc", str(folder)]) == 0
    assert "13 chunks kept, 1 damaged chunks deleted" in capsys.readouterr().out
    assert main(["cache", "verify", str(folder)]) == 0


def test_clear_and_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = DiskTier(folder, 2**22)
    assert main(["cache", "ls", str(folder)]) == 0  # also while it is in use
    assert main(["cache", "clear", str(folder)]) == 1
    assert "in use by process" in capsys.readouterr().err
    tier.close()
    assert main(["cache", "clear", str(folder)]) == 0
    assert main(["cache", "ls", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("0 chunks, 0.0 MB\n")
    assert main(["cache", "ls", str(folder / "elsewhere")]) == 1
    assert "is not the folder of a disk tier" in capsys.readouterr().err
    assert main(["cache", "ls", "redis://me:secret@host"]) == 1
    error = capsys.readouterr().err
    assert "is not a folder" in error and "secret" not in error


def test_what_is_done_is_told_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    (folder / "foreign").write_bytes(bytes(3 << 20))
    for action in ("verify", "gc", "clear"):
        assert main(["cache", action, str(folder), "--json"]) == 0
        told[action] = json.loads(capsys.readouterr().out)
    assert told["verify"] == {"chunks": 14, "damaged": 0, "lost": 0}
    assert (told["gc"]["kept"], told["gc"]["dropped"]) == (14, 0)
    assert 0 < told["clear"]["freed_mb"] < 2  # what is not a tier's stays
    assert (folder / "foreign").exists()


def test_verify_misses_what_is_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = folder / "index-v2.log"
    index.write_bytes(index.read_bytes()[:-100])
    assert main(["cache", "verify", str(folder)]) == 1
    assert "1 index records unreadable" in capsys.readouterr().out
