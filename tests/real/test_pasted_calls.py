"""The calls of a server that the README and the docs show work as pasted."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from servers import KVBoostServer, find_program

pytestmark = [pytest.mark.model, pytest.mark.servers]

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / "docs/guides/vllm.md"  # calls of vLLM's server
DOCS = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("**/*.md")} - {THEIRS})]
SHOWN_URL = "http://127.0.0.1:8000"
CALL = re.compile(r"^curl (?:.*\\\n)*.*$", re.MULTILINE)  # with the lines that continue it
CALLS = [(doc.name, call) for doc in DOCS for call in CALL.findall(doc.read_text())]


def test_the_readme_and_the_docs_show_calls() -> None:
    assert {name for name, _ in CALLS} >= {"README.md", "server.md"}


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_a_call_is_answered(name: str, call: str, live: KVBoostServer) -> None:
    assert SHOWN_URL in call
    command = [find_program("bash"), "-c", call.replace(SHOWN_URL, live.url)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    events = [line for line in run.stdout.splitlines() if line.startswith("data: ")]
    if events:
        assert events.pop() == "data: [DONE]"
    for each in events or [run.stdout]:
        assert "error" not in json.loads(each.removeprefix("data: "))
    if name == "README.md":
        assert "Paris" in run.stdout


def test_the_python_example_of_the_server_runs(
    live: KVBoostServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(
        r"```python\n(.+?)```", (ROOT / "docs/guides/server.md").read_text(), re.DOTALL
    )
    names: dict[str, object] = {}
    exec(code.replace(SHOWN_URL, live.url), names)
    names["client"].close()
    assert capsys.readouterr().out.strip().isdigit()
