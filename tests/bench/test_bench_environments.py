"""Environments of peers: made once, found again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvboost.bench import environments
from kvboost.bench.environments import OWN, RECIPES, Recipe, make, python_of
from kvboost.bench.systems import SYSTEMS
from kvboost.errors import ConfigError, KVBoostError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_BENCH_DIR", str(tmp_path))
    monkeypatch.delenv("KVBOOST_BENCH_VLLM_PYTHON", raising=False)
    return tmp_path


def test_an_environment_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setitem(RECIPES, "tiny", Recipe(("--version",), built.append))
    assert python_of("tiny") is None
    python = make("tiny")
    assert python_of("tiny") == python
    said = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True)
    assert Path(said.stdout.decode().strip()) == folder / "tiny" / "venv"
    assert make("tiny") == python and built == [folder / "tiny"]
    monkeypatch.setitem(RECIPES, "tiny", Recipe(("--version",), built.append, ("another flag",)))
    assert python_of("tiny") is None


def test_one_whose_build_fails_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(folder: Path) -> None:
        environments.run([sys.executable, "-c", "print('no compiler'); raise SystemExit(2)"])

    monkeypatch.setattr(environments.venv, "create", lambda *_, **__: None)  # takes seconds
    monkeypatch.setitem(RECIPES, "wrong", Recipe((), build))
    with pytest.raises(KVBoostError, match=r"failed \(2\):\nno compiler"):
        make("wrong")
    assert python_of("wrong") is None


def test_ours_run_with_this_python_and_vllm_with_a_named_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert python_of(OWN) == Path(sys.executable)
    assert python_of("vllm") is None
    monkeypatch.setenv("KVBOOST_BENCH_VLLM_PYTHON", sys.executable)
    assert python_of("vllm") == Path(sys.executable)
    monkeypatch.setenv("KVBOOST_BENCH_VLLM_PYTHON", "/no/python")
    with pytest.raises(ConfigError, match="names no Python"):
        python_of("vllm")
    assert python_of("public") is None


def test_unknown_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sglang' to make; there are: llama, public, vllm"):
        make("sglang")


def test_llama_is_built_for_the_processor_that_is_there() -> None:
    flags = environments.instruction_flags(frozenset({"avx", "avx2", "avx512bw", "amx_tile"}))
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=OFF"} <= set(flags)
    assert not any("AMX" in flag for flag in flags)
    assert environments.instruction_flags(frozenset()) == []


def test_the_folder_is_in_the_users_cache_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBOOST_BENCH_DIR")
    assert environments.base() == Path.home() / ".cache" / "kvboost" / "bench"


def test_every_system_has_an_environment() -> None:
    assert {system.environment for system in SYSTEMS.values()} == {OWN, *RECIPES}
