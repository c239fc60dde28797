"""A real Prometheus reads the metrics, and every expression of the dashboard finds something."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import make_dashboard
from kvboost.server.telemetry import Telemetry
from servers import Server, find_program, free_port, web_server
from serving import FakeEngine, failed, record
from waiting import wait_until

pytestmark = pytest.mark.servers

CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: kvboost, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


@pytest.fixture
def telemetry() -> Telemetry:
    telemetry = Telemetry(FakeEngine(), model="smol")
    telemetry.observe(record())
    telemetry.observe(failed())
    return telemetry


@pytest.fixture
def prometheus(telemetry: Telemetry, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that reads `telemetry` every second."""
    program, port = find_program("prometheus"), free_port()

    def answer(*_: object) -> tuple[int, bytes]:
        telemetry.observe(record())
        return 200, telemetry.render()[0]

    with web_server(answer) as scraped:
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.format(port=scraped))
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        server = Server([*command, f"--web.listen-address=127.0.0.1:{port}"], port)
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url))
        yield url
        server.kill()


def is_ready(prometheus: str) -> bool:
    """Prometheus takes connections before it takes queries: until then it answers 503."""
    try:
        urllib.request.urlopen(f"{prometheus}/-/ready").close()
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False
    return True


def found(prometheus: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}") as reply:
        result: list[Any] = json.load(reply)["data"]["result"]
    return result


def test_what_is_exported_passes_promtool(telemetry: Telemetry) -> None:
    command = [find_program("promtool"), "check", "metrics"]
    checked = subprocess.run(command, input=telemetry.render()[0], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()


def test_every_panel_of_the_dashboard_has_data(prometheus: str) -> None:
    wait_until(lambda: found(prometheus, "rate(kvboost_requests_total[1m]) > 0"))
    empty = []
    for panel in make_dashboard.dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            if "vllm:" not in expression and not found(prometheus, expression):
                empty.append((panel["title"], expression))
    assert empty == []
