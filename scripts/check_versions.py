"""Test the core with the oldest or the newest versions that pyproject.toml claims.

    python scripts/check_versions.py oldest --python python3.10
    python scripts/check_versions.py newest --python python3.13 --pin torch==2.13.0

Makes a virtual environment under build/versions and runs the tests of the core there. Torch from
PyPI brings gigabytes of CUDA packages; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
has builds without them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TOOLS = ["httpx", "hypothesis", "pytest", "pytest-timeout"]
# What may break with another torch or Transformers, in a few minutes; no servers, no extras.
TESTS = [
    "batch/test_batch.py",
    "batch/test_batch_reuse.py",
    "batch/test_paged_batch.py",
    "codecs",
    "engine/test_engine.py",
    "engine/test_reuse_anywhere.py",
    "engine/test_tiers.py",
    "models/test_identity.py",
    "models/test_pool.py",
    "parity",
    "reuse",
    "test_core.py",
    "test_rope.py",
    "tiers/test_disk.py",
    "tiers/test_memory.py",
]

SHOW = """
import sys
from importlib.metadata import version
print("Python", sys.version.split()[0], *(f"{name} {version(name)}" for name in sys.argv[1:]))
"""


def claims(project: Path) -> list[Requirement]:
    """What the library itself requires."""
    text = project.read_text()
    return [Requirement(line) for line in tomllib.loads(text)["project"]["dependencies"]]


def oldest(claimed: list[Requirement]) -> list[str]:
    """Each claim at its lower bound.

    Raises:
        ValueError: a claim has no lower bound, so nothing says what was tested.
    """
    pins = []
    for claim in claimed:
        bounds = [bound.version for bound in claim.specifier if bound.operator == ">="]
        if not bounds:
            raise ValueError(f"{claim}: no lower bound")
        pins.append(f"{claim.name}=={bounds[0]}")
    return pins


def with_pins(wanted: list[str], pins: list[str]) -> list[str]:
    """`wanted`, where pins of the same package replace what was there."""
    pinned = {Requirement(pin).name for pin in pins}
    return [line for line in wanted if Requirement(line).name not in pinned] + pins


def make_environment(folder: Path, python: str, wanted: list[str]) -> Path:
    """Install the project and `wanted` into a new environment; its Python comes back."""
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    inside = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    # One call: pip then also says whether the claims can be met together.
    install = [str(inside), "-m", "pip", "install", "--quiet", "-e", str(ROOT), *wanted, *TOOLS]
    subprocess.run(install, check=True)
    return inside


def main() -> int:
    """Make the environment, print what is in it, run the tests; their exit code comes back."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["oldest", "newest"])
    parser.add_argument("--python", default=sys.executable, help="the Python to make it with")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="NAME==VERSION", help="use this instead"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    arguments = parser.parse_args()

    claimed = claims(ROOT / "pyproject.toml")
    wanted = oldest(claimed) if arguments.which == "oldest" else [str(claim) for claim in claimed]
    inside = make_environment(
        arguments.folder / f"{arguments.which}-{Path(arguments.python).name}",
        arguments.python,
        with_pins(wanted, arguments.pin),
    )
    names = [claim.name for claim in claimed]
    subprocess.run([str(inside), "-c", SHOW, *names], check=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("PYTHONPATH", None)
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    pytest = [str(inside), "-m", "pytest", "-q", "-m", "not servers and not model", *tests]
    return subprocess.run(pytest, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
