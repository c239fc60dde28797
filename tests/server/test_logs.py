"""The lines that a server writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvboost.server.logs import JsonLines, TextLines, configure, log_fields
from kvboost.server.telemetry import Telemetry
from serving import FakeEngine, record


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging as it was: its setup is the process's, not the test's."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_request_is_one_json_object_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    Telemetry(FakeEngine(), model="smol").observe(record(request_id="a\nb\x1b[31m"))
    (line,) = lines(capsys)
    told = json.loads(line)
    assert told["request_id"] == "a\nb\x1b[31m" and "\x1b" not in line
    assert (told["logger"], told["level"], told["message"]) == (
        "kvboost.request",
        "info",
        "request",
    )
    assert told["time"].endswith("+00:00")
    assert told["endpoint"] == "/v1/chat/completions"


def test_loggers_of_others_write_the_same_lines_and_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler())
    logging.getLogger("uvicorn.error").setLevel("CRITICAL")
    configure("json")
    for name in ("uvicorn.error", "uvicorn.access", "kvboost.tiers.guarded"):
        logging.getLogger(name).warning("%s says %d", name, 7)
    told = [json.loads(line) for line in lines(capsys)]
    assert [each["message"] for each in told] == [f"{each['logger']} says 7" for each in told]
    assert len(told) == 3


def test_a_traceback_is_part_of_its_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("kvboost").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_below_the_level_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "warning")
    logging.getLogger("kvboost").info("quiet")
    assert lines(capsys) == []


def test_where_no_terminal_is_auto_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logging.getLogger("kvboost").info("hello")
    assert json.loads(lines(capsys)[0])["message"] == "hello"


def test_text_for_people_has_the_fields_and_stays_in_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("text")
    fields = {"status": 200, "request_id": "x\nERROR forged", "error": "", "ttft_ms": None}
    log_fields(logging.getLogger("kvboost.request"), logging.INFO, "request", fields)
    (line,) = lines(capsys)
    assert "error" not in line and "ttft_ms" not in line
    assert "INFO" in line and "status=200" in line and r'request_id="x\nERROR forged"' in line


def test_both_styles_can_show_any_value() -> None:
    made = logging.makeLogRecord({"msg": "m", "kvboost_fields": {"odd": object()}})
    assert "odd" in JsonLines().format(made) and "odd" in TextLines().format(made)
