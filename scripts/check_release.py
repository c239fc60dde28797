"""Build a release and try it as a user gets it: `just release-check`, before a tag and at it.

    python scripts/check_release.py --pin torch==2.13.0     # here with that build of torch
    python scripts/check_release.py --offline               # what needs no downloads

What is built lies in build/release afterwards: dist/ with the files to publish, and the SBOM.
Offline, nothing is isolated: the build uses the tools of this Python, the wheel its packages, and
nothing is audited.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from sysconfig import get_path
from typing import Any

ROOT = Path(__file__).parents[1]
DISTRIBUTION = "kvboost"
COMMANDS = ("kvboost", "kvboost-server")
HEADING = re.compile(r"^## \[(.+?)\] - (.+)$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Of the top level of a source archive; what else lies in a clone stays there.
IN_SDIST = {
    *(".dockerignore", ".gitignore", "LICENSE", "PKG-INFO", "justfile", "pyproject.toml"),
    *(".github", "benchmarks", "deploy", "docs", "examples", "scripts", "src", "tests"),
}


class Failed(Exception):
    """A check that did not hold, and why."""


def run(*command: str | Path) -> str:
    """What a program prints, which must end well.

    Raises:
        Failed: with what it said.
    """
    # What is tried must be what was installed, not the tree around it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=tempfile.gettempdir(), env=environment, capture_output=True, text=True
    )
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()[-20:]
        raise Failed("\n".join([f"{' '.join(words)}: exit code {done.returncode}", *said]))
    return done.stdout


def version_of(root: Path) -> str:
    """The version, from the one place that has it."""
    text = (root / "src" / "kvboost" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise Failed("src/kvboost/__init__.py has no __version__")
    return found[1]


def check_changelog(changelog: str, version: str) -> None:
    """The newest heading is of this version and has a date."""
    newest = HEADING.search(changelog)
    if newest is None or newest[1] != version:
        raise Failed(f"CHANGELOG.md begins with {newest and newest[1]}, the version is {version}")
    if not DATE.fullmatch(newest[2]):
        raise Failed(f"CHANGELOG.md: {version} is dated {newest[2]!r}, expected YYYY-MM-DD")


def check_tag(root: Path, version: str) -> None:
    """No other commit has been released under this version."""
    tagged = run("git", "-C", root, "tag", "--list", f"v{version}").strip()
    if tagged:
        commits = [run("git", "-C", root, "rev-list", "-n1", at) for at in (tagged, "HEAD")]
        if commits[0] != commits[1]:
            raise Failed(f"{tagged} is another commit: choose a new version")


def build(root: Path, target: Path, *, is_offline: bool) -> None:
    """Build the source archive, and the wheel from it."""
    for old in target.glob("*"):
        old.unlink()
    isolation = ["--no-isolation"] if is_offline else []
    run(sys.executable, "-m", "build", *isolation, "--outdir", target, root)


def built(target: Path, ending: str) -> Path:
    """The one file of this kind that was built."""
    found = list(target.glob(f"*{ending}"))
    if len(found) != 1:
        raise Failed(f"{len(found)} files *{ending} in {target}, expected 1")
    return found[0]


def check_wheel(wheel: Path, root: Path, version: str) -> None:
    """The wheel has the package, all of it, its licence and commands, and nothing else."""
    source = root / "src"
    package = {
        path.relative_to(source).as_posix()
        for path in (source / "kvboost").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = f"{DISTRIBUTION}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        _compare("wheel", package | {f"{about}/licenses/LICENSE"}, names, allowed=f"{about}/")
        commands = archive.read(f"{about}/entry_points.txt").decode()
    missing = [name for name in COMMANDS if not re.search(rf"^{name} = ", commands, re.MULTILINE)]
    if missing:
        raise Failed(f"the wheel has no command {', '.join(missing)}")


def check_sdist(sdist: Path, root: Path) -> None:
    """The source archive has what a release can be built and tested from, and no stray files."""
    with tarfile.open(sdist) as archive:
        paths = [PurePosixPath(name).parts[1:] for name in archive.getnames()]
    top = {parts[0] for parts in paths if parts}
    pages = {path.name for path in root.glob("*.md")}
    _compare("source archive", IN_SDIST | pages, top)
    stray = ["/".join(parts) for parts in paths if {".env", "__pycache__", "venv"} & {*parts}]
    if stray:
        raise Failed(f"the source archive has {', '.join(stray[:5])}")


def _compare(what: str, expected: set[str], names: set[str], allowed: str = "") -> None:
    missing = sorted(expected - names)
    unknown = sorted(n for n in names - expected if not (allowed and n.startswith(allowed)))
    if missing or unknown:
        raise Failed(f"the {what} lacks {missing[:5]} and has {unknown[:5]} beyond what it should")


def python_of(environment: Path) -> Path:
    """The Python of a virtual environment."""
    return environment / ("Scripts" if os.name == "nt" else "bin") / "python"


def make_environment(folder: Path, wheel: Path, pins: Iterable[str], *, is_offline: bool) -> Path:
    """Install the wheel into a new environment; its Python comes back."""
    run(sys.executable, "-m", "venv", "--clear", folder)
    python = python_of(folder)
    if is_offline:
        # Behind the wheel on the path. Files .pth in that folder, as of editable projects, are
        # not followed.
        here = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(here, "borrowed.pth").write_text(get_path("purelib"))
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    else:
        run(python, "-m", "pip", "install", "--quiet", wheel, *pins)
    return python


def smoke(python: Path, version: str) -> None:
    """What is installed imports without torch, has its commands, and answers with reuse."""
    run(python, ROOT / "scripts" / "smoke.py", version)
    said = run(python.parent / COMMANDS[0], "--help")
    if "serve" not in said:
        raise Failed(f"{COMMANDS[0]} --help does not name its commands")


def write_sbom(python: Path, target: Path) -> None:
    """List what a user of the release gets, as CycloneDX JSON."""
    project = ["--pyproject", ROOT / "pyproject.toml", "--mc-type", "library"]
    make = [sys.executable, "-m", "cyclonedx_py", "environment", *project]
    # To validate what the same program has just made takes minutes where there are many packages.
    run(*make, "--no-validate", "--output-reproducible", "--output-file", target, python)
    names = {
        component["name"].lower() for component in json.loads(target.read_text())["components"]
    }
    if not {"torch", "transformers"} <= names:
        raise Failed(f"{target.name} does not list what the release needs")


def audit(python: Path) -> None:
    """Nothing that a user gets has a known vulnerability."""
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    # A build of torch for one device has a version that the database does not know.
    lines = [f"{each['name']}=={each['version'].partition('+')[0]}" for each in listed]
    wanted = [line for line in lines if not line.startswith((f"{DISTRIBUTION}==", "pip=="))]
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text("\n".join(wanted))
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        command = [sys.executable, "-m", "pip_audit", *options, "-r", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True)
    judge_audit(done.stdout, done.stderr)


def judge_audit(report: str, said: str) -> None:
    """Raise for what pip-audit found, and for what it could not look up."""
    try:
        found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except ValueError:
        last = said.strip().splitlines()[-1:]
        raise Failed(f"pip-audit gave no report: {' '.join(last)}") from None
    skipped = [each["name"] for each in found if "skip_reason" in each]
    if len(skipped) == len(found):
        # It takes a server that knows no package for one that knows no vulnerability.
        raise Failed("pip-audit could not reach its service: no package was found there")
    wrong = [f"{each['name']} {v['id']}" for each in found for v in each.get("vulns", [])]
    if wrong or skipped:
        raise Failed(
            f"known vulnerabilities: {wrong or 'none'}; not looked up: {skipped or 'none'}"
        )


def main() -> int:
    """Do all steps, also after one has failed; 0 if none has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--offline", action="store_true", help="leave out what needs downloads")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="NAME==VERSION", help="install this beside it"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "release")
    given = parser.parse_args()
    folder = given.folder.absolute()
    dist, environment = folder / "dist", folder / "environment"
    dist.mkdir(parents=True, exist_ok=True)
    version, offline = partial(version_of, ROOT), given.offline
    python = python_of(environment)
    steps: list[tuple[str, Callable[[], object]]] = [
        ("changelog", lambda: check_changelog((ROOT / "CHANGELOG.md").read_text(), version())),
        ("tag", lambda: check_tag(ROOT, version())),
        ("build", partial(build, ROOT, dist, is_offline=offline)),
        ("twine", lambda: run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())),
        ("wheel", lambda: check_wheel(built(dist, ".whl"), ROOT, version())),
        ("source archive", lambda: check_sdist(built(dist, ".tar.gz"), ROOT)),
        (
            "install",
            lambda: make_environment(
                environment, built(dist, ".whl"), given.pin, is_offline=offline
            ),
        ),
        ("smoke", lambda: smoke(python, version())),
        ("sbom", partial(write_sbom, python, folder / "sbom.cdx.json")),
    ]
    if not offline:
        steps.append(("audit", partial(audit, python)))
    return 1 if sum(failed(title, step) for title, step in steps) else 0


def failed(title: str, step: Callable[[], object]) -> bool:
    """Do a step and say how it went."""
    started = time.monotonic()
    try:
        step()
    except (Failed, OSError, KeyError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        print(f"{title}: FAILED: {kind}{error}", flush=True)
        return True
    print(f"{title}: ok, {time.monotonic() - started:.0f} s", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
