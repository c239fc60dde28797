"""The archives that would be published, built from this tree and installed as a user would."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from check_release import (
    ROOT,
    Failed,
    build,
    built,
    check_sdist,
    check_wheel,
    make_environment,
    run,
    smoke,
    version_of,
    write_sbom,
)

VERSION = version_of(ROOT)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, is_offline=True)
    return folder


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "environment"
    return make_environment(folder, built(dist, ".whl"), [], is_offline=True)


def test_pypi_would_take_both_archives(dist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_archives_have_what_they_should_and_nothing_else(dist: Path) -> None:
    check_wheel(built(dist, ".whl"), ROOT, VERSION)
    check_sdist(built(dist, ".tar.gz"), ROOT)


@pytest.mark.parametrize("stray", ["tests/test_core.py", "kvboost/notes.txt", "benchmarks/run.py"])
def test_a_wheel_with_stray_files_is_found(dist: Path, tmp_path: Path, stray: str) -> None:
    wheel = Path(shutil.copy(built(dist, ".whl"), tmp_path))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(stray, "")
    with pytest.raises(Failed, match=stray):
        check_wheel(wheel, ROOT, VERSION)


@pytest.mark.parametrize("lost", ["kvboost/py.typed", "kvboost/bench/report/page.css"])
def test_a_wheel_without_its_data_is_found(dist: Path, tmp_path: Path, lost: str) -> None:
    wheel = tmp_path / "kvboost.whl"
    with (
        zipfile.ZipFile(built(dist, ".whl")) as whole,
        zipfile.ZipFile(wheel, "w") as archive,
    ):
        for name in whole.namelist():
            if name != lost:
                archive.writestr(name, whole.read(name))
    with pytest.raises(Failed, match=lost):
        check_wheel(wheel, ROOT, VERSION)


@pytest.mark.tiny
def test_the_installed_wheel_answers_with_reuse(python: Path) -> None:
    smoke(python, VERSION)


def test_it_is_the_wheel_that_is_tried(python: Path) -> None:
    where = run(python, "-c", "import kvboost; print(kvboost.__file__)")
    assert Path(where.strip()).is_relative_to(python.parents[1])


def test_the_sbom_lists_what_a_user_gets(python: Path, tmp_path: Path) -> None:
    write_sbom(python, tmp_path / "sbom.json")
    sbom = json.loads((tmp_path / "sbom.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "kvboost"
