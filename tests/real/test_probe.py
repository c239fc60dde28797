"""`kvboost probe` on our own server: no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.probe import run
from servers import kvboost_server

pytestmark = [pytest.mark.model, pytest.mark.servers, pytest.mark.alone, pytest.mark.long]

NUM_RUNS = 10


def test_our_server_raises_no_alarm(smol: str, tmp_path: Path) -> None:
    with kvboost_server(smol, tmp_path / "log", "--dtype", "float32") as server:
        for _ in range(NUM_RUNS):
            report = run(f"{server.url}/v1")
            assert report.ok and report.num_requests <= 200 and report.seconds < 130, report
            found = report.finding("facts")
            assert found is not None and found.light == "green", report.as_json()
