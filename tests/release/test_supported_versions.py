"""What is said of supported versions, against pyproject.toml, which decides."""

from __future__ import annotations

import re

import pytest
import yaml
from packaging.requirements import Requirement

from check_versions import ROOT, TESTS, claims, oldest, with_pins

CLAIMED = claims(ROOT / "pyproject.toml")


def test_the_oldest_of_a_claim_is_its_lower_bound() -> None:
    claimed = [Requirement("torch>=2.6,<3"), Requirement("numpy>=1.26")]
    assert oldest(claimed) == ["torch==2.6", "numpy==1.26"]
    with pytest.raises(ValueError, match="xxhash: no lower bound"):
        oldest([Requirement("xxhash")])


def test_a_pin_replaces_what_was_wanted() -> None:
    assert with_pins(["torch==2.6", "numpy==1.26"], ["torch==2.13.0"]) == [
        "numpy==1.26",
        "torch==2.13.0",
    ]


def test_the_tests_that_are_to_run_exist() -> None:
    assert [name for name in TESTS if not (ROOT / "tests" / name).exists()] == []


def test_the_pages_name_the_oldest_versions() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    readme = (ROOT / "README.md").read_text()
    bounds = dict(pin.split("==") for pin in oldest(CLAIMED))
    for name, title in (("torch", "torch"), ("transformers", "Transformers")):
        assert f"| {title} | {bounds[name]} |" in page
        assert f"{title} {bounds[name]} or newer" in readme


def test_every_python_that_is_claimed_is_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text())
    matrix = workflow["jobs"]["core"]["strategy"]["matrix"]
    (oldest_python,) = re.findall(
        r'requires-python = ">=(.+)"', (ROOT / "pyproject.toml").read_text()
    )
    first, last = matrix["python"][0], matrix["python"][-1]
    assert first == oldest_python == matrix["include"][0]["python"]
    assert f"| Python | {first} | {last} |" in (ROOT / "docs" / "versions.md").read_text()
