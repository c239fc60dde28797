"""`kvboost doctor --vllm`: what is said of a running vLLM, by its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from kvboost.cli.main import main

VLLM = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 6000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 4.0e+03
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 20.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 20.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1000.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
"""
NOTHING = {
    "requests": 0, "prompt_tokens": 0, "exact_tokens": 0, "moved_tokens": 0, "repaired_tokens": 0,
    "stored_chunks": 0, "tier_faults": 0, "dropped_writes": 0, "damaged_frames": 0,
    "foreign_frames": 0,
}  # fmt: skip
WARM = NOTHING | {"requests": 40, "exact_tokens": 5000, "moved_tokens": 2000,
                  "repaired_tokens": 300, "stored_chunks": 70}  # fmt: skip


class FakeVllm(BaseHTTPRequestHandler):
    metrics: ClassVar[str] = ""
    key: ClassVar[str] = ""

    def do_GET(self) -> None:
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}":
            self.send_error(401)
            return
        pages = {"/metrics": self.metrics, "/v1/models": '{"data": [{"id": "m"}]}'}
        if self.path not in pages:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(pages[self.path].encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(FakeVllm, "metrics", with_connector(WARM))
    monkeypatch.delenv("KVBOOST_VLLM_KEY", raising=False)
    server = HTTPServer(("127.0.0.1", 0), FakeVllm)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def with_connector(counts: dict[str, int], own_hits: int = 1000) -> str:
    text = VLLM.replace("} 1000.0", f"}} {own_hits}.0")
    lines = [f'vllm:kvboost_{n}_total{{engine="0"}} {count}.0' for n, count in counts.items()]
    return text + "\n".join(lines) + "\n"


def test_it_shows_where_prompt_tokens_came_from(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--vllm", url + "/v1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "m tokens share",
        "prompt tokens 10,000 100.0%",
        "vLLM's own prefix cache 1,000 10.0%",
        "connector, exact 5,000 50.0%",
        "connector, moved 2,000 20.0%",
        "of it computed again 300 3.0%",
        "",
        "GOOD the connector is active: 40 requests were looked up",
    ]


def test_json_has_the_counters(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--vllm", url, "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (page["url"], page["models"], page["is_active"]) == (url, ["m"], True)
    assert page["counters"] == WARM | {
        "finished_requests": 40, "own_hits": 1000, "all_prompt_tokens": 10000
    }  # fmt: skip
    assert page["shares"] == {"vllm": 0.1, "exact": 0.5, "moved": 0.2, "repaired": 0.03}
    assert [each["level"] for each in page["findings"]] == ["good"]


def told(url: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Levels and sentences."""
    main(["doctor", "--vllm", url])
    page = capsys.readouterr().out.rpartition("\n\n")[2] or ""
    return [" ".join(line.split()) for line in page.splitlines()]


@pytest.mark.parametrize(
    ("counts", "own_hits", "expected"),
    [
        (WARM | {"tier_faults": 1234}, 0, "WARNING 1,234 faults of tiers"),
        (WARM | {"dropped_writes": 3}, 0, "WARNING 3 chunks were not written"),
        (WARM | {"damaged_frames": 2}, 0, "WARNING 2 frames were damaged"),
        (WARM | {"foreign_frames": 1}, 0, "WARNING 1 frames belonged to another"),
        (NOTHING, 0, "WARNING none of 40 requests was looked up"),
        (NOTHING | {"requests": 40, "stored_chunks": 9}, 500, "NOTE prompts repeat, but nothing"),
        (NOTHING | {"requests": 40, "stored_chunks": 9}, 0, "NOTE no prompt has begun"),
        (NOTHING | {"requests": 40}, 0, "WARNING nothing was stored"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    counts: dict[str, int],
    own_hits: int,
    expected: str,
) -> None:
    monkeypatch.setattr(FakeVllm, "metrics", with_connector(counts, own_hits))
    sentences = told(url, capsys)
    assert [each for each in sentences if not each.startswith("GOOD")] == [sentences[-1]]
    assert sentences[-1].startswith(expected)


def test_few_requests_without_hits_are_nothing_to_worry_about(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeVllm, "metrics", with_connector(NOTHING | {"requests": 19}))
    assert told(url, capsys) == ["GOOD the connector is active: 19 requests were looked up"]


def test_a_vllm_without_the_connector_is_told_how_to_get_it(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeVllm, "metrics", VLLM)
    assert main(["doctor", "--vllm", url]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("WARNING") and "--kv-transfer-config" in line


def test_a_key_is_sent_and_its_absence_told(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeVllm, "key", "secret")
    assert main(["doctor", "--vllm", url]) == 1
    assert "set KVBOOST_VLLM_KEY" in capsys.readouterr().err
    monkeypatch.setenv("KVBOOST_VLLM_KEY", "secret")
    assert main(["doctor", "--vllm", url]) == 0


@pytest.mark.parametrize("metrics", ["", "kvboost_requests_total 3\n", "<html>"])
def test_another_server_is_told_in_a_line(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], metrics: str
) -> None:
    monkeypatch.setattr(FakeVllm, "metrics", metrics)
    assert main(["doctor", "--vllm", url]) == 1
    assert "is not vLLM" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_a_server_that_is_not_there_is_told_in_a_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--vllm", url]) == 1
    error = capsys.readouterr().err
    assert "no vLLM at" in error and error.count("\n") == 1
