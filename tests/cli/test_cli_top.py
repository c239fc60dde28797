"""`kvboost top`, as an operator calls it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any

import pytest
from rich.console import Console

import make_pictures
from kvboost.cli import top
from kvboost.cli.main import main
from kvboost.cli.screen import draw
from kvboost.connectors.vllm import checkup
from kvboost.errors import ConfigError
from kvboost.server.telemetry import Telemetry
from servers import web_server
from serving import FakeEngine, failed, record

KEY = "secret-key"


@pytest.fixture
def figures() -> dict[str, Any]:
    engine = FakeEngine()
    telemetry = Telemetry(engine, model="smol")
    for _ in range(3):
        telemetry.observe(record())
    telemetry.observe(failed(request_id="req-\x1b[2J"))
    return {
        "engine": engine.cache_stats(),
        "batch": engine.batch_stats(),
        "requests": telemetry.summary(),
    }


@pytest.fixture
def server(figures: dict[str, Any]) -> Iterator[str]:
    """The URL of a server of these figures, which wants a key."""

    def answer(path: str, headers: Message) -> tuple[int, bytes]:
        if headers["Authorization"] != f"Bearer {KEY}":
            return 401, b""
        return 200, json.dumps(figures if path == "/v1/stats" else {}).encode()

    with web_server(answer) as port:
        yield f"http://127.0.0.1:{port}"


def shown(stats: dict[str, Any], width: int = 80, trouble: str = "") -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw(stats, "http://server", trouble))
    return console.export_text()


def test_once_shows_load_reuse_tiers_and_errors(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_API_KEY", KEY)
    assert main(["top", "--once", "--url", server + "/"]) == 0
    screen = capsys.readouterr().out
    assert "11 of 16" in screen and "3 of 256" in screen
    assert "exact 60%  moved 30%  miss 10%  repaired 5%" in screen
    assert "p50 500.0 ms" in screen
    assert "700 MB / 1.0 GB" in screen and "DOWN" in screen
    assert "503 queue_full" in screen and "4 since the start, 1 with errors" in screen


def test_json_is_what_the_server_says(
    server: str, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--json", "--url", server, "--api-key", KEY]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(figures))


def test_what_a_client_sent_does_not_steer_the_terminal(figures: dict[str, Any]) -> None:
    screen = shown(figures)
    assert "\x1b[2J" not in screen and r"req-\x1b[2J" in screen


def test_a_terminal_of_80_columns_is_wide_enough() -> None:
    narrow, wide = (shown(make_pictures.STATS, width) for width in (80, 200))
    assert len(narrow.splitlines()) == len(wide.splitlines())
    assert "…" not in narrow


def test_a_quiet_server_is_shown_too(figures: dict[str, Any]) -> None:
    figures["requests"] = Telemetry(FakeEngine(), model="smol").summary()
    screen = shown(figures)
    assert "none in the last minute" in screen and "p50 -" in screen and "no errors" in screen


def test_old_figures_are_marked_with_what_went_wrong(figures: dict[str, Any]) -> None:
    assert "no server at x" in shown(figures, trouble="no server at x")


def test_a_server_that_is_not_there_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert "no server at http://127.0.0.1:9" in told and "kvboost serve" in told
    assert told.count("\n") == 1


def test_a_missing_key_is_told(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", server, "--api-key", "wrong"]) == 1
    assert "KVBOOST_API_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("ask", [top.fetch, lambda url, _: checkup.check_up(url)])
def test_a_key_that_no_header_holds_is_not_shown(
    ask: Callable[[str, str], object], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(checkup.KEY, "sk-sécret\nX: y")
    with pytest.raises(ConfigError) as error:
        ask(server, "sk-sécret\nX: y")
    assert "cret" not in str(error.value)


def test_another_kind_of_server_is_told(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", server + "/other", "--api-key", KEY]) == 1
    assert "is not a KVBoost server" in capsys.readouterr().err
    assert main(["top", "--once", "--url", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err


def test_the_picture_in_the_docs_is_what_top_draws() -> None:
    kept = (make_pictures.PICTURES / "top.svg").read_text()
    assert re.findall(r">([^<]+)</text>", kept) == re.findall(
        r">([^<]+)</text>", make_pictures.top_svg()
    )
