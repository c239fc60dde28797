"""Two minutes of what `benchmarks/run.py soak` does for thirty, on a real model."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

import fuzz
import soak
from conftest import real_model
from servers import free_port

pytestmark = [pytest.mark.model, pytest.mark.servers]
START_S = 120.0
FLAGS = {
    "--dtype": "float32",
    "--max-batch-size": "8",
    "--max-queue-size": "16",
    "--max-cache-bytes": "64MiB",
    "--num-blocks": "1024",
    "--request-deadline-s": "20",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """URL and process of a running server."""
    port = free_port()
    command = [sys.executable, "-m", "kvboost.server", "--port", str(port)]
    command += ["--model", real_model("SmolLM2-135M-Instruct")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *sum(FLAGS.items(), ())], stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail("the server did not start")


def test_mixed_load_is_held(server: tuple[str, int]) -> None:
    url, pid = server
    # Allocators still fill their caches in two minutes: this bound finds thorough leaks only.
    watch = ["--pid", str(pid), "--max-growth", "0.3"]
    load = ["--minutes", "2", "--clients", "32", "--questions", "16", "--burst-every", "20"]
    assert soak.run(options_of(soak, url, *load, *watch))[0]["violations"] == []


def test_random_bodies_are_answered_or_refused(server: tuple[str, int]) -> None:
    url, _ = server
    assert fuzz.run(options_of(fuzz, url, "--bodies", "1000"))[0]["violations"] == []


def options_of(module: ModuleType, url: str, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(["--url", url, *flags])
