"""The command line as such: names, flags, help, examples and exit codes; no model is loaded."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvboost.cli.main import COMMANDS, main, make_parser

SOURCE = Path(__file__).parents[2] / "src" / "kvboost"
SHARED = ("--model", "--gguf-file", "--device", "--disk-cache-dir", "--cache-url")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "DTYPE", "DEVICE", "REUSE", "GGUF_FILE", "DISK_CACHE_DIR", "CACHE_URL"):
        monkeypatch.delenv(f"KVBOOST_{name}", raising=False)


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
heavy = ("torch", "transformers", "numpy", "pydantic", "fastapi", "rich", "shtab")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["genrate"], "no command 'genrate'; did you mean 'generate'?"),
        (["xyzzy"], "no command 'xyzzy': there are serve, generate, chat"),
        ([], "a command is missing: there are serve"),
        (["generate", "hi"], "required: --model"),
        (["generate", "hi", "--model", "m", "--reuse", "some"], "'some' is none of off, exact"),
        (["generate", "hi", "--model", "m", "--max-new-tokens", "0"], "whole number above 0"),
        (["chat", "--model", "m", "--temperature", "-1"], "number of at least 0"),
        (["chat", "--model", "m", "--dtype", "int3"], "'int3' is none of auto, float32"),
        (["generate", "hi", "--file", "x", "--model", "m"], "not allowed with argument"),
        (["warm", "--model", "m"], "required: PATH"),
        (["warm", "x", "--model", "m"], "give --disk-cache-dir or --cache-url"),
        (["chat", "--mod", "m"], "required: --model"),  # names are not guessed
    ],
)
def test_wrong_usage_is_told_with_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "hi", "--model", "/no/such"], "'/no/such': there is no such folder or file"),
        (["generate", "--file", "/no/file", "--model", "m"], "No such file"),
        (["verify", "/no/file", "--model", "m"], "No such file"),
        (["warm", "/no/file", "--model", "m", "--disk-cache-dir", "kv"], "No such file"),
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
    assert "'some' is none of exact, auto" in capsys.readouterr().err


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
    assert "needs the extra `cli`: pip install '.[cli]'" in capsys.readouterr().err


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


def test_an_unknown_flag_is_told_with_the_command_s_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hi", "--model", "m", "--max-new-token", "5"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("usage: kvboost generate")
    assert "did you mean '--max-new-tokens'?" in said


def test_a_number_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyze", "log.jsonl", "--prefill-speed", "4K"])
    assert "'4K' is not a number above 0" in capsys.readouterr().err
