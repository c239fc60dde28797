"""The examples without a model: what they are told, and how they count."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import make_pictures
from examples import common, run
from kvboost import GenerationResult

EXAMPLES = Path(run.__file__).parent
LONGEST = 80


class FakeEngine:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def flush(self) -> None:
        pass

    def generate(self, *, reuse: str) -> GenerationResult:
        """Takes 100 ms without reuse; with reuse as many as were asked before."""
        self.asked.append(reuse)
        ttft_ms = 100.0 if reuse == "off" else float(len(self.asked))
        numbers: Any = {"prompt_tokens": 50, "cached_tokens": 40, "total_ms": 200.0}
        others: Any = {"token_ids": [], "reuse": None, "output_texts": [], "output": None}
        others["finish_reason"] = "length"
        return GenerationResult(output_text=reuse, ttft_ms=ttft_ms, **numbers, **others)


def trial(engine: Any, console: Console | None = None) -> common.Trial:
    settings = common.read_settings(Path("none"), {})
    shown = console or Console(file=io.StringIO(), width=90)
    return common.Trial(engine, shown, settings, is_demo=False)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_list_has_every_example_with_a_line() -> None:
    lines = call("--list").stdout.splitlines()
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__", "common", "run"}
    assert files == set(run.FILES.values())
    assert {line.split()[0] for line in lines} == set(run.EXAMPLES)
    assert len(lines) == 5 and all(len(line.split()) > 4 for line in lines)


def test_the_picture_in_the_docs_is_what_the_list_shows() -> None:
    kept = (make_pictures.PICTURES / "examples-list.svg").read_text()
    assert kept == make_pictures.list_svg()


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    done = call("--example", "few-shots")
    assert done.returncode == 2
    assert "no example 'few-shots'; did you mean 'fewshot'?" in done.stderr


def test_an_example_is_short() -> None:
    texts = {name: (EXAMPLES / f"{name}.py").read_text() for name in run.FILES.values()}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: length for name, length in lengths.items() if length >= LONGEST} == {}


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("KVBOOST_MODEL=file\nKVBOOST_DTYPE=bfloat16\nKVBOOST_MAX_NEW_TOKENS=5\n")
    environ = {"KVBOOST_MODEL": "environment", "KVBOOST_DTYPE": "float16"}
    assert common.read_settings(file, {}).model == "file"
    assert common.read_settings(file, environ).model == "environment"
    assert common.read_settings(file, environ, "flag") == common.Settings(
        model="flag", dtype="float16", device=None, max_new_tokens=5
    )


def test_the_file_to_copy_names_every_setting_and_changes_none() -> None:
    told = common.read_settings(EXAMPLES / ".env.example", {})
    assert told == common.read_settings(Path("none"), {})
    names = [f"KVBOOST_{name.upper()}=" for name in common.Settings.__dataclass_fields__]
    text = (EXAMPLES / ".env.example").read_text()
    assert all(name in text for name in names) and text.count("KVBOOST_") == len(names)


def test_neither_mode_is_always_the_first() -> None:
    engine = FakeEngine()
    asking = trial(engine)
    for _ in range(3):
        assert asking.ask("a question", engine.generate) == "exact"
    assert engine.asked == ["off", "exact", "exact", "off", "off", "exact"]


def test_the_table_leaves_out_the_first_prompt_and_counts_texts() -> None:
    engine = FakeEngine()
    asking = trial(engine)
    for _ in range(4):
        asking.ask("a question", engine.generate)
    console = Console(file=io.StringIO(), width=80)
    console.print(common.table({"multiturn": asking, "none": trial(engine)}, "title"))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    # With reuse they took 2 (left out), 3, 6 and 7 ms.
    row = ["multiturn", "3", "50", "80%", "100", "ms", "6", "ms", "16.7x", "0", "of", "3"]
    assert row in rows
    assert not any(each[:1] == ["none"] for each in rows)


def test_a_difference_is_shown_and_marks_in_a_text_are_not_taken_for_colours() -> None:
    shown = Console(file=io.StringIO(), width=90, force_terminal=True, color_system=None)
    engine = FakeEngine()
    asking = trial(engine, shown)
    asking.ask("list[int] or [/b]?", engine.generate)
    text = shown.file.getvalue()
    assert "list[int] or [/b]?" in text and "without reuse: off" in text
    assert "40 of 50 tokens reused, first token after 2 ms instead of 100 ms" in text


def test_scripted_questions_are_asked_where_nobody_types() -> None:
    for is_terminal in (True, False):  # of what is shown; nothing is typed in a test
        shown = Console(file=io.StringIO(), force_terminal=is_terminal)
        assert list(trial(FakeEngine(), shown).questions(["one", "two"])) == ["one", "two"]


@pytest.mark.parametrize("end", ["", None])
def test_what_is_typed_is_asked_until_an_empty_line_or_the_end(
    monkeypatch: pytest.MonkeyPatch, end: str | None
) -> None:
    lines = iter(["first", " second ", end])

    def read(_: str) -> str:
        if (line := next(lines)) is None:
            raise EOFError
        return line

    shown = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(shown, "input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert list(trial(FakeEngine(), shown).questions(["one"])) == ["first", "second"]
