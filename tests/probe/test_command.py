"""`kvboost probe`: what it prints and writes, its exit code, its limits."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost.cli.main import main
from kvboost.errors import KVBoostError
from kvboost.probe import run
from kvboost.probe.client import Budget, BudgetSpent, connect
from kvboost.probe.session import LIGHT, WHOLE
from kvboost.probe.statistics import more_p, separation, sign_p
from kvboost.probe.texts import Texts
from probe.engine import Engine, serving


def probe(*arguments: str) -> int:
    return main(["probe", *arguments, "--yes"])


def test_a_healthy_server_in_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, figures = tmp_path / "probe.html", tmp_path / "probe.prom"
    with serving(Engine()) as url:
        assert probe(url, "--light", "--html", str(page), "--metrics", str(figures)) == 0
    said = capsys.readouterr().out
    assert "fake" in said and "● green" in said and "docs/guides/probe.md" in said
    assert "Are answers from the cache right?" in page.read_text()
    families = {each.name: each for each in text_string_to_metric_families(figures.read_text())}
    assert families["kvboost_probe_ok"].samples[0].value == 1
    levels = {s.labels["finding"]: s.value for s in families["kvboost_probe_level"].samples}
    assert levels["facts"] == 0


def test_a_damaged_cache_is_exit_code_1_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine("damaged")) as url:
        assert probe(url, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["light"] == "red" and not report["ok"]
    assert report["num_requests"] <= 200
    assert next(f for f in report["findings"] if f["name"] == "facts")["figures"]["damaged"] >= 2


def test_answers_across_a_restart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "answers.json"
    for fault, code in (("", 0), ("stale after restart", 1)):
        engine = Engine(fault)
        with serving(engine) as url:
            assert probe(url, "--before", str(kept)) == 0
            engine.restart()
            assert probe(url, "--after", str(kept)) == code
    assert "lost the planted fact" in " ".join(capsys.readouterr().out.split())


def test_a_log_adds_what_reuse_would_save(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, text = tmp_path / "requests.jsonl", "A sentence that many prompts begin with. " * 60
    bodies = [{"messages": [{"role": "user", "content": f"{text}{n}"}]} for n in range(4)]
    log.write_text("\n".join(map(json.dumps, bodies)))
    with serving(Engine()) as url:
        assert probe(url, "--light", "--json", "--log", str(log)) == 0
    found = json.loads(capsys.readouterr().out)["findings"][-1]
    assert found["name"] == "traffic" and found["figures"]["prefix"] > 0.5
    assert "prefix cache can reuse" in found["sentence"]


def test_what_cannot_be_probed_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert probe("http://127.0.0.1:9/v1") == 1
    assert "with its /v1" in capsys.readouterr().err
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    with serving(Engine()) as url:
        assert probe(url, "--after", str(wrong)) == 1
        assert "was not written by --before" in capsys.readouterr().err
        wrong.write_text('{"model": "another"}')
        assert probe(url, "--after", str(wrong)) == 1
        assert "wrong.json is of model 'another', not " in capsys.readouterr().err


def test_a_redirect_to_another_host_is_not_followed() -> None:
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.2:{self.server.server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(KVBoostError, match="status 307"):
            run(f"http://127.0.0.1:{server.server_port}/v1", model="any")
    finally:
        server.shutdown()
        server.server_close()
    assert set(asked) == {"/v1/chat/completions"}


def test_a_budget_ends_a_probe_and_its_parts() -> None:
    whole = Budget(requests=5, tokens=1000, seconds=60)
    part = whole.part(60)
    with serving(Engine()) as url:
        server = connect(url, None, "", part)
        for _ in range(5):
            server.ask("Hello", 2)
        with pytest.raises(BudgetSpent):
            server.ask("Hello", 2)
        server.http.close()
    assert (whole.num_requests, part.num_requests) == (5, 5)
    with pytest.raises(BudgetSpent):
        Budget(requests=5, tokens=1000, seconds=-1).spend(1)
    spent = Budget(requests=5, tokens=10, seconds=60)
    spent.spend(10)
    with pytest.raises(BudgetSpent):
        spent.spend(1)


def test_documents_are_new_in_every_run_and_hold_their_fact() -> None:
    first, second = (Texts(seed).document(200) for seed in ("a", "b"))
    assert first.prompt[:20] != second.prompt[:20]
    assert first.prompt == Texts("a").document(200).prompt
    assert first.holds(f"It is {first.code[:2]},{first.code[2:]}.") and not second.holds(first.text)
    assert not first.holds(f"It is {first.code}7.")
    twin = first.salted("0123456789")
    assert twin.text.split(".", 1)[1] == first.text.split(".", 1)[1] and twin.text != first.text


def test_statistics_are_exact() -> None:
    assert separation([1, 2, 3], [4, 5, 6]).p == pytest.approx(1 / 20)
    told = separation([1, 4, 6], [2, 3, 5])
    assert told.auc == pytest.approx(4 / 9) and told.low < 0.5 < told.high
    assert sign_p(10, 10) == pytest.approx(2**-10)
    assert more_p(3, 3, 0, 3) == pytest.approx(1 / 20)


def test_a_key_is_neither_shown_nor_sent_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine()) as url:
        assert run(url, key="sk-secret\n", light=True).ok
        assert probe(url, "--key", "sk-sécret") == 1
        assert probe(url, "--other-key", "sk-sécret", "--light") == 1
        assert probe(url.replace("//", "//me:sk-secret@")) == 1
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err and "cret" not in shown.err
    assert shown.err.count("characters that no key has") == 2
    assert probe("http://127.0.0.1:99999/v1") == 1


def test_a_canary_outlives_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures, waits = tmp_path / "probe.prom", []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvboost.cli.probe.time.sleep", wait)
    assert probe("http://127.0.0.1:9/v1", "--watch", "3", "--metrics", str(figures)) == 130
    assert waits == [180, 180] and "kvboost_probe_ok 0" in figures.read_text()


def test_a_missing_log_is_told_before_anything_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = Engine()
    with serving(engine) as url:
        assert probe(url, "--log", str(tmp_path / "none.jsonl")) == 1
    assert "none.jsonl" in capsys.readouterr().err and engine.num_requests == 0


def test_sizes_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{WHOLE.requests} requests, {WHOLE.tokens:,} tokens" in said
    assert f"at most {LIGHT.requests} requests" in said


def test_a_probe_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "import kvboost.probe, kvboost.probe.report, kvboost.cli.probe"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
