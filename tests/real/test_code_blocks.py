"""The code in the README and the docs runs as it is pasted, each block alone.

A block of Python that needs the one above it says so in its first line.

`pytest tests/real/test_code_blocks.py -k guides/server` runs one page. A name of a model, the
address of a server and that of a Redis stand for those that the tests have. Commands of ours run in
this process, which has the libraries loaded; `tests/cli` starts processes.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kvboost.cli.main import main
from loras import save_adapter
from pages import (
    CONTINUES,
    PAGES,
    ROOT,
    Fence,
    does_nothing,
    fences,
    is_shown,
    name_of,
    outputs,
    statements,
    what_runs,
)
from servers import find_program, redis_server
from tiny_gguf import write_gguf

pytestmark = [pytest.mark.model, pytest.mark.servers]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SERVER, REDIS = "http://127.0.0.1:8000", "redis://127.0.0.1:6379"
BESIDE = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")  # texts for examples to read
PRELUDE = """set -euo pipefail
curl() { command curl --no-progress-meter --fail-with-body "$@"; }
"""
OWN_COMMAND = re.compile(
    r"kvboost (?:explain|generate|warm)\b[^|<>&;$`]*"
)  # and nothing of a shell
PATIENCE_S = 300
README = ROOT / "README.md"


def to_run(page: Path) -> list[Fence]:
    """The blocks of a page that do something when they run."""
    return [
        each
        for each in fences(page)
        if each.why_not_run is None
        and (
            each.language == "python"
            or (each.language == "sh" and not does_nothing(what_runs(each.text)))
        )
    ]


class Reader:
    """Somebody who pastes the blocks of a page, one after the other, into a folder."""

    def __init__(self, page: Path, stands_for: dict[str, str]) -> None:
        self._page, self._stands_for = page, stands_for
        self._outputs = outputs(page)
        self._names: dict[str, Any] = {}

    def paste(self, block: Fence) -> str:
        """Run a block; what it has written to standard output, which is what the page shows."""
        code = block.text
        for shown, real in self._stands_for.items():
            code = code.replace(shown, real)
        if block.language == "python":
            if not code.startswith(CONTINUES):
                self.leave()
            before = self.opened()
            # Line numbers of a traceback are those of the page.
            program = compile("\n" * (block.line - 1) + code, str(self._page), "exec")
            printed = io.StringIO()
            with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
                warnings.simplefilter("ignore")  # other packages have theirs
                warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
                exec(program, self._names)
            after = {id(each) for each in self.opened()}
            self._close(each for each in before if id(each) not in after)
            self._compare(block, printed.getvalue())
            return printed.getvalue()
        return _run_statements(statements(what_runs(code)))

    def _compare(self, block: Fence, printed: str) -> None:
        shown = self._outputs.get(block.line, printed)
        assert is_shown(shown, printed), f"line {block.line} shows\n{shown}and prints\n{printed}"

    def leave(self) -> None:
        self._close(reversed(self.opened()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # clients of frameworks leave sockets to the collector
            self._names.clear()
            self._names["__name__"] = "__main__"
            gc.collect()

    def opened(self) -> list[Any]:
        """Engines, clients and files that the page has names for."""
        kinds = [(each, type(each)) for each in self._names.values()]
        return [
            each for each, kind in kinds if hasattr(kind, "close") and hasattr(kind, "__enter__")
        ]

    def _close(self, things: Iterable[Any]) -> None:
        for each in things:
            each.close()


def _run_statements(lines: list[str]) -> str:
    """Commands that load a model by `main`, all else by a shell; what they have written."""
    written = ""
    for is_own, group in groupby(lines, lambda each: OWN_COMMAND.fullmatch(each) is not None):
        together = list(group)
        written += "".join(
            map(_run_command, together) if is_own else [_run_script("".join(together))]
        )
    return written


def _run_command(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(shlex.split(command.replace("\\\n", ""), comments=True)[1:])
    assert code == 0, f"{command}\n{printed.getvalue()}"
    return printed.getvalue()


def _run_script(script: str) -> str:
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [find_program("bash"), "-c", PRELUDE + script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PATH": beside_python},
    )
    assert run.returncode == 0, f"{script}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    events = [line for line in run.stdout.splitlines() if line.startswith("data: ")]
    assert not any('"error"' in each for each in events)
    assert not events or events[-1] == "data: [DONE]"
    return run.stdout


def _make_files(text: str, model: str) -> None:
    """The adapters and GGUF files that a page names."""
    adapters = {*re.findall(r"\badapters/\w+", text)}
    for seed, name in enumerate(sorted(adapters)):
        save_adapter(AutoModelForCausalLM.from_pretrained(model), Path(name), seed)
    for name in {*re.findall(r"\bmodels/\w+\.gguf", text)}:
        Path(name).parent.mkdir(exist_ok=True)
        write_gguf(Path(name))


@contextlib.contextmanager
def reader_of(page: Path, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """Starts what the page needs; at the end everything that it opened is closed."""
    text = "".join(each.text for each in to_run(page))
    stands_for = {MODEL: request.getfixturevalue("smol")}
    _make_files(text, stands_for[MODEL])
    with contextlib.ExitStack() as stack:
        if SERVER in text:
            stands_for[SERVER] = request.getfixturevalue("live").url
        if REDIS in text:
            port = stack.enter_context(redis_server()).port
            stands_for[REDIS] = f"redis://127.0.0.1:{port}"
        reader = Reader(page, stands_for)
        stack.callback(reader.leave)
        yield reader


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BESIDE:
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != README and to_run(page)], ids=name_of
)
def test_the_blocks_of_a_page_run(page: Path, request: pytest.FixtureRequest) -> None:
    with reader_of(page, request) as reader:
        for block in to_run(page):
            reader.paste(block)


def test_the_readme_runs_and_shows_what_it_says(request: pytest.FixtureRequest) -> None:
    with reader_of(README, request) as reader:
        shown = {block.text: reader.paste(block) for block in to_run(README)}
    (questions,) = [out for code, out in shown.items() if "kv_reuse_ratio" in code]
    shares = re.findall(r"([\d.]+)% reused, first token after [\d,]+ ms", questions)
    assert len(shares) == 2
    assert float(shares[0]) == 0 and float(shares[1]) > 95
    (documents,) = [out for code, out in shown.items() if "documents=" in code]
    moved = re.findall(r"(\d+) moved", documents)
    assert len(moved) == 2
    assert all(int(count) > 500 for count in moved)
    (answer,) = [out for code, out in shown.items() if SERVER in code]
    assert "Paris" in answer


def test_the_folder_of_the_readme_warms_the_next_engine(request: pytest.FixtureRequest) -> None:
    (block,) = [each for each in to_run(README) if 'disk_cache_dir="kv-cache"' in each.text]
    cached = []
    for _ in range(2):
        with reader_of(README, request) as reader:
            reader.paste(block)
            (engine,) = reader.opened()
            cached.append(engine.generate("One, two, three, four, five. " * 20, 4).cached_tokens)
    assert cached[0] == 0 and cached[1] > 100


def test_servers_of_the_docs_are_called() -> None:
    pages = {name_of(page) for page in PAGES if any(SERVER in each.text for each in to_run(page))}
    assert {"README", "guides/server"} <= pages
