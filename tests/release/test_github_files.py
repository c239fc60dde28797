"""The files that GitHub reads, by its schemas and against the project."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from kvboost.cli.main import make_parser

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    {*(GITHUB / "ISSUE_TEMPLATE").glob("*.yml")} - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)
COMMAND = re.compile(r"`(kvboost [a-z]+(?: -?-?[^`]+)?)`")


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("vendor.dependabot", [GITHUB / "dependabot.yml"]),
    ],
)
def test_files_fit_the_schemas_of_github(schema: str, files: list[Path]) -> None:
    assert files
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", schema, *map(str, files)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_only_unless_a_job_says_so(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_actions_have_major_versions() -> None:
    used = [name for path in WORKFLOWS for name in re.findall(r"uses: (\S+)", path.read_text())]
    others = [name for name in used if not name.startswith("./")]
    assert others
    assert [name for name in others if not re.fullmatch(r"[\w/-]+@(release/)?v\d+", name)] == []


def test_what_a_workflow_runs_is_in_the_tree() -> None:
    recipes = {line.split()[0].strip(":") for line in (ROOT / "justfile").read_text().splitlines()
               if re.match(r"[a-z-]+.*:", line)}  # fmt: skip
    for path in WORKFLOWS:
        said = path.read_text()
        assert all((ROOT / name).exists() for name in re.findall(r"scripts/\w+\.py", said))
        assert {*re.findall(r"run: just (\S+)", said)} <= recipes


def test_nothing_is_published_before_there_is_a_name() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["publish"]["if"] == "vars.PYPI_NAME != ''"
    assert {"gate", "build"} <= {*jobs["publish"]["needs"]}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_commands_that_a_form_asks_for_exist(path: Path) -> None:
    parser = make_parser()
    commands = COMMAND.findall(" ".join(path.read_text().split()))
    for command in commands:
        words = shlex.split(command)[1:]
        if "--json" in words:
            assert parser.parse_args(words)
        else:  # it is only named
            assert f"    {words[0]} " in parser.format_help()
    assert commands or path.stem == "bug"
