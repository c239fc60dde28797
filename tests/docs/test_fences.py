"""Code in the README and the docs that is not run can still be read by what it is for."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from benchmarks import run as benchmarks
from check_versions import tomllib
from kvboost.cli.main import make_parser
from kvboost.errors import ConfigError
from kvboost.server.options import read_options
from pages import (
    DOCS,
    ONLY_CHECKED,
    PAGES,
    ROOT,
    Fence,
    fences,
    is_shown,
    name_of,
    outputs,
    statements,
)
from servers import find_program

CHECKS: dict[str, Callable[[str], object]] = {
    "toml": tomllib.loads,
    "json": json.loads,
    "yaml": yaml.safe_load,
    "python": lambda code: compile(code, "page", "exec"),
}
SHOWN_ONLY = {"text", "html", "sql"}
SERVERS = (["kvboost", "serve"], ["kvboost-server"])


def flags_of(statement: str) -> list[str]:
    """The words of a command, without variables before it and `&` behind it."""
    words = shlex.split(statement.replace("\\\n", " "), comments=True)
    while re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return [each for each in words if each != "&"]


def check_command(statement: str) -> None:
    """Hold a command that is too long to run against its own parser."""
    words = flags_of(statement)
    for server in SERVERS:
        if words[: len(server)] == server:
            options = make_parser().parse_args(["serve", *words[len(server) :]])
            read_options(vars(options), {})
            return
    if words[0] == "kvboost":
        make_parser().parse_args(words[1:])
    elif words[2] != "bench":
        benchmarks.make_parser().parse_args(words[2:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_is_of_a_known_language_and_parses(page: Path) -> None:
    for fence in fences(page):
        known = {*CHECKS, *SHOWN_ONLY, "sh"}
        assert fence.language in known or fence.language.startswith("{"), f"line {fence.line}"
        CHECKS.get(fence.language, len)(fence.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fences_are_closed(page: Path) -> None:
    ticks = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
    assert len(ticks) == 2 * len(fences(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_tested_instead_exists(page: Path) -> None:
    excuses = " ".join(each.why_not_run or "" for each in fences(page))
    named = re.findall(r"\btests/[\w/.]*\w", excuses)
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_python_of_the_server_guide_can_be_pasted_alone() -> None:
    blocks = [each for each in fences(DOCS / "guides/server.md") if each.language == "python"]
    command = [find_program("ruff"), "check", "--quiet", "--isolated", "--select", "F821", "-"]
    for block in blocks:  # undefined names
        run = subprocess.run(command, input=block.text, text=True, capture_output=True)
        assert run.returncode == 0, f"line {block.line}: {run.stdout}"
    assert len(blocks) > 2


def commands_of(page: Path) -> list[str]:
    """What is not run, by rule or with an excuse, and can be held against a parser."""
    return [
        each
        for fence in fences(page)
        if fence.language == "sh"
        for each in statements(fence.text)
        if ONLY_CHECKED.match(each) or (fence.why_not_run and each.startswith("kvboost "))
    ]


COMMANDS = [(name_of(page), each) for page in PAGES for each in commands_of(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_that_is_not_run_has_flags_that_exist(page: str, command: str) -> None:
    try:
        check_command(command)
    except SystemExit:
        pytest.fail(f"{page}: {command}")


def test_the_server_takes_the_file_that_its_options_show(tmp_path: Path) -> None:
    (shown,) = fences(DOCS / "reference/server-options.md")
    (tmp_path / "server.toml").write_text(shown.text)
    server, engine = read_options({"config": str(tmp_path / "server.toml")}, {})
    assert server.warm == ("handbook.txt",)
    assert engine.max_cache_bytes == 4 * 2**30


def test_the_check_finds_a_wrong_flag() -> None:
    for wrong in (
        "kvboost serve --model x --prot 1",
        "A=1 kvboost-server --model x --reuse sometimes &",
        "kvboost bench run --modle x",
        "python benchmarks/run.py speed --modle x",
    ):
        with pytest.raises((SystemExit, ConfigError)):
            check_command(wrong)


def test_a_fence_is_read_with_what_excuses_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- not run: an hour -->\n```sh\nmake it\n```\n\n- b\n  ```text\n  c\n  ```\n"
    )
    assert fences(page) == [
        Fence("sh", "make it\n", 4, "an hour"),
        Fence("text", "c\n", 9, None),
    ]


def test_an_output_is_what_stands_right_below_the_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx\n```\n\nwords\n\n```text\n2\n```\n"
    )
    assert outputs(page) == {2: "1\n"}


def test_what_is_shown_may_leave_out_and_not_differ() -> None:
    assert is_shown("0% of ... tokens\ndone\n", "0% of 551 tokens \ndone\n")
    assert not is_shown("0% of ... tokens\ndone\n", "1% of 551 tokens\ndone\n")
    assert not is_shown("0% of ... tokens\n", "0% of 551 tokens\ndone\n")
    assert is_shown("99% reused, 88 ms\n", "99% reused, 1,203 ms\n")
    assert not is_shown("99% reused, 88 ms\n", "0% reused, 88 ms\n")
