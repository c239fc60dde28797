"""The command line as such: names, flags, help, examples and exit codes; no model is loaded."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvboost.cli.main import COMMANDS, EPILOG, main, make_parser
from kvboost.server.__main__ import PACKAGES

SOURCE = Path(__file__).parents[2] / "src" / "kvboost"
SHARED = ("--model", "--gguf-file", "--device", "--disk-cache-dir", "--cache-url")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "DTYPE", "DEVICE", "REUSE", "GGUF_FILE", "DISK_CACHE_DIR", "CACHE_URL"):
        monkeypatch.delenv(f"KVBOOST_{name}", raising=False)


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` configures the logging of its process."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser's commands and their parts."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield part
                yield from parsers(part)


def flag(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return parser._option_string_actions.get(name)


def runs(parser: argparse.ArgumentParser) -> bool:
    return parser.get_default("run") is not None


def examples(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Arguments of the calls that a parser shows, without pipes, files and comments."""
    lines = re.findall(r"^  (.*kvboost .*)$", parser.epilog or "", flags=re.MULTILINE)
    calls = [line.rpartition("| ")[2] for line in lines]
    words = [shlex.split(re.split(r" >>? ", call)[0], comments=True) for call in calls]
    assert all(each[0] == "kvboost" for each in words)
    return [each[1:] for each in words]


def test_every_command_says_what_it_does_with_examples_that_parse() -> None:
    parser = make_parser()
    described = list(parsers(parser))
    assert len(described) > len(COMMANDS)
    for each in described:
        assert each.description, each.prog
        assert examples(each), each.prog
        for call in examples(each):
            assert parser.parse_args(call).run, call


def test_shared_flags_are_the_same_everywhere() -> None:
    described = {each.prog: each for each in parsers(make_parser())}
    serve = described.pop("kvboost serve")
    described.pop("kvboost probe")  # its --model is a name that a server knows
    for name in (*SHARED, "--reuse", "--dtype"):
        assert flag(serve, name), name
    for name in SHARED:
        found = [action for each in described.values() if (action := flag(each, name))]
        assert len(found) >= 5
        assert len({(each.help, each.default, each.metavar) for each in found}) == 1, name
    modes = [action for each in described.values() if (action := flag(each, "--reuse"))]
    assert {each.default for each in modes} == {"exact"}


def test_every_result_can_be_had_as_json() -> None:
    without = [
        each.prog for each in parsers(make_parser()) if runs(each) and not flag(each, "--json")
    ]
    assert without == ["kvboost serve", "kvboost completion"]


def test_help_loads_only_what_it_needs() -> None:
    program = f"""
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from kvboost.cli.main import main
def shown(*arguments):
    with redirect_stdout(StringIO()) as out, suppress(SystemExit):
        main([*arguments, "--help"])
    return out.getvalue()
assert "exit codes" in shown()
commands = {list(COMMANDS)}
assert not [name for name in commands if "kvboost.cli." + name in sys.modules]
for name in commands:
    assert shown(name).startswith("usage: kvboost " + name), name
heavy = ("torch", "transformers", "numpy", "pydantic", "fastapi", "httpx", "rich", "shtab")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--file", "/no/file", "--model", "m"], "No such file"),
        (["verify", "/no/file", "--model", "m"], "No such file"),
        (["explain", "/no/file", "--model", "m"], "No such file"),
        (["warm", "/no/file", "--model", "m", "--disk-cache-dir", "kv"], "No such file"),
        (["analyze", "/no/file"], "/no/file"),
        (["cache", "ls", "/no/folder"], "/no/folder"),
    ],
)
def test_what_fails_is_told_in_a_line_with_code_1(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    *before, last = printed.err.splitlines()
    assert last.startswith("kvboost: ") and told in last
    assert all(each.startswith("loading ") for each in before)
    assert printed.out == ""


def test_a_folder_without_a_model_and_a_name_without_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, told in ((str(tmp_path), "has no config.json"), ("nobody/nothing", "pass a folder")):
        assert main(["verify", "--model", model]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"kvboost: model '{model}': ") and told in last


def test_doctor_tells_in_a_line_that_a_model_cannot_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"kvboost: model '{tmp_path}': ") and not last.endswith(":")


# The least that a command accepts.
CALLS = {
    "serve": [],
    "generate": ["hi"],
    "chat": [],
    "warm": ["x", "--disk-cache-dir", "kv"],
    "explain": ["x"],
    "verify": [],
    "doctor": [],
    "bench": ["run"],
    "analyze": [],
    "probe": ["http://127.0.0.1:9/v1"],
    "cache": ["ls", "x"],
    "top": [],
    "keys": ["new", "--tenant", "t"],
    "completion": ["bash"],
}
WITH_MODEL = ["serve", "generate", "chat", "warm", "explain", "verify", "doctor", "bench"]


def code_of(*arguments: str) -> object:
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_the_codes_are_those_of_the_table() -> None:
    told = re.findall(r"^  (\d+) ", EPILOG, flags=re.MULTILINE)
    assert told == ["0", "1", "2", "130"]
    assert {*CALLS} == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_wrong_usage_have_one_code_in_all_commands(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(command, "--help") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: kvboost {command}") and shown.err == ""
    assert code_of(command, *CALLS[command], "--no-such-flag") == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"usage: kvboost {command}")


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_missing_model_is_wrong_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(command, *CALLS[command]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: kvboost {command}") and "--model" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["genrate"], "no command 'genrate'; did you mean 'generate'?"),
        (["xyzzy"], "no command 'xyzzy': there are serve, generate, chat"),
        (["generate", "hi", "--model", "m", "--reuse", "some"], "'some': expected one of off"),
        (["generate", "hi", "--model", "m", "--max-new-tokens", "0"], "whole number above 0"),
        (["chat", "--model", "m", "--temperature", "-1"], "number of at least 0"),
        (["chat", "--model", "m", "--dtype", "int3"], "'int3': expected one of auto, float32"),
        (["generate", "hi", "--file", "x", "--model", "m"], "not allowed with argument"),
        (["warm", "--model", "m"], "required: PATH"),
        (["warm", "x", "--model", "m"], "nothing to save to: pass --disk-cache-dir or --cache-url"),
        (["chat", "--mod", "m"], "required: --model"),  # names are not guessed
        (["generate", "hi", "--model", "m", "--max-new-token", "5"], "mean '--max-new-tokens'?"),
        (["analyze", "log", "--prefill-speed", "4K"], "'4K' is not a number above 0"),
        (["serve", "--model", "m", "--port", "99999"], "port=99999: expected"),
        (["serve", "--model", "m", "--reuse", "some"], "reuse='some': expected one of off"),
        (["serve", "--model", "m", "--config", "/no/such/file"], "config file /no/such/file"),
        (["doctor", "--model", "m", "--seconds", "0"], "--seconds=0.0: expected a number above 0"),
        (["explain", "x", "--model", "m", "--chunk-size", "0", "--json"], "chunk_size=0: expected"),
        (["analyze", "--replicas", "0"], "--replicas: expected"),
        (["analyze", "--replicas", "2"], "--replicas reads the log once for each fleet"),
        (["analyze", "x", "--block-tokens", "0"], "--block-tokens: expected numbers above 0"),
        (["bench", "run", "--model", "m", "--systems", "none"], "argument --systems: invalid"),
        (["chat", "--model", "m", "--top-p", "1.5"], "argument --top-p: '1.5': expected"),
        (["chat", "--model", "m", "--top-k", "0"], "argument --top-k: '0': expected"),
        (["probe"], "the following arguments are required: URL"),
        (["probe", "http://127.0.0.1:9/v1", "--load", "0"], "--load: expected"),
        (["probe", "http://127.0.0.1:9/v1", "--watch", "0"], "--watch: expected"),
        (["probe", "http://127.0.0.1:9/v1", "--before", "x", "--after", "x"], "argument --after"),
        (["cache"], "the following arguments are required: ACTION"),
        (["keys", "new"], "the following arguments are required: --tenant"),
        (["completion", "fish"], "argument shell: invalid choice: 'fish'"),
    ],
)
def test_wrong_usage_is_told_in_the_last_line_with_code_2(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("a prompt")
    assert code_of(*arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in last and told in last


@pytest.mark.parametrize("command", WITH_MODEL[:-1])
def test_a_model_that_is_not_there_is_a_failure(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("a prompt")
    port = ("--port", "0") if command == "serve" else ()
    assert code_of(command, *CALLS[command], *port, "--model", "/no/such") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "kvboost: model '/no/such': there is no such folder or file"


def test_the_bare_command_and_the_module_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of() == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: kvboost ") and EPILOG in shown.out
    assert shown.err == ""
    done = subprocess.run([sys.executable, "-m", "kvboost"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown.out, "")


@pytest.mark.parametrize(
    ("load", "given", "chosen"),
    [(9999.0, None, "PASSIVE"), (9999.0, "ACTIVE", "ACTIVE"), (0.0, None, None)],
)
def test_threads_sleep_while_they_wait_on_a_busy_machine(
    load: float, given: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert main(["keys", "new", "--tenant", "a"]) == 0
    assert os.environ.get("OMP_WAIT_POLICY") == chosen


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def read(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(["explain", "-", "--model", "any"]) == 130


def test_variables_of_the_server_are_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBOOST_MODEL", "folder")
    monkeypatch.setenv("KVBOOST_DTYPE", "bf16")
    monkeypatch.setenv("KVBOOST_DISK_CACHE_DIR", "kv")
    options = make_parser("warm").parse_args(["warm", "a.txt", "--disk-cache-dir", "other"])
    assert (options.model, options.dtype) == ("folder", "bfloat16")
    assert options.disk_cache_dir == "other"
    monkeypatch.setenv("KVBOOST_REUSE", "some")
    with pytest.raises(SystemExit):
        main(["warm", "a.txt"])
    assert "'some': expected one of exact, auto" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "disk-cache-dir" in script and "bfloat16" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "not installed: pip install shtab" in capsys.readouterr().err


def test_explain_without_rich_says_so_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["explain", "/no/file", "--model", "/no/model"]) == 1
    told = "explain needs packages that are not installed: pip install rich; or use --json"
    assert capsys.readouterr().err == f"kvboost: {told}\n"


def test_the_server_s_packages_are_those_of_its_extra() -> None:
    wanted = {Requirement(each) for each in metadata.requires("kvboost") or ()}
    extra = {
        each.name
        for each in wanted
        if str(each.marker) == 'extra == "server"'  # with a condition: not needed everywhere
    }
    named = {Requirement(each.strip("'")).name for each in PACKAGES.split()}
    assert named == extra


def test_no_message_names_the_other_project_of_this_name() -> None:
    wrong = re.compile(r"pip install ['\"]?kvboost|kvboost\[")
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    found = [str(path) for path, text in texts.items() if wrong.search(text)]
    assert found == []


def test_a_new_key_as_json_is_alone_on_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "a", "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert told["key"].startswith("kvb-") and 'tenant = "a"' in told["entry"]
    assert printed.err == ""
