"""The Dockerfiles, against the project that they install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import DOCKERFILES, IMAGES, ROOT, Image

from kvboost.errors import ConfigError
from kvboost.server.gate import OPEN_PATHS
from kvboost.server.options import read_options
from servers import find_program, web_server

PINNED = re.compile(r"[a-z./-]+:\S*\d\S*")


@pytest.mark.parametrize("path", DOCKERFILES, ids=str)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    run = subprocess.run([find_program("hadolint"), path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=str)
def test_an_image_is_built_from_what_docker_is_sent(path: Path) -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    image = Image(path)
    assert image.copied and {f"!{name}" for name in image.copied} <= {*sent}
    assert all((ROOT / name).exists() for name in image.copied)
    assert all(PINNED.fullmatch(base) for base in image.bases), image.bases
    # The build backend wants these, whatever else it takes.
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= {*image.copied}


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="source archives have no gate")
def test_all_have_the_torch_of_the_gate() -> None:
    version = re.compile(r"torch==([\d.]+)")
    (expected,) = version.findall((ROOT / ".ci/run").read_text())
    for path in DOCKERFILES:
        assert version.findall(path.read_text()) == [expected], path


@pytest.mark.parametrize("path", IMAGES, ids=str)
def test_a_server_in_an_image_runs_as_nobody_and_hears_signals(path: Path) -> None:
    image = Image(path)
    assert image.said("ENTRYPOINT") == ['["kvboost", "serve"]']  # no shell between
    assert image.said("STOPSIGNAL") == ["SIGTERM"]
    (user,) = image.said("USER")
    assert all(int(part) > 0 for part in user.split(":"))
    assert image.said("EXPOSE") == [image.environment["KVBOOST_PORT"]]


@pytest.mark.parametrize("path", IMAGES, ids=str)
def test_an_image_serves_nobody_without_keys(path: Path) -> None:
    given = Image(path).environment | {"KVBOOST_MODEL": "some"}
    with pytest.raises(ConfigError, match="--api-keys"):
        read_options({}, given)
    options, _ = read_options({}, given | {"KVBOOST_API_KEYS": "keys.toml"})
    assert not options.is_local


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("path", IMAGES, ids=str)
def test_the_health_check_tells(path: Path, status: int) -> None:
    asked = []

    def answer(path: str, _: object) -> tuple[int, bytes]:
        asked.append(path)
        return status, b""

    with web_server(answer) as port:
        python, *rest = Image(path).health_command
        assert python == "python"
        run = subprocess.run(
            [sys.executable, *rest],
            env={**os.environ, "KVBOOST_PORT": str(port)},
            capture_output=True,
        )
    assert (run.returncode == 0) == (status == 200)
    assert asked == ["/health"] and asked[0] in OPEN_PATHS
