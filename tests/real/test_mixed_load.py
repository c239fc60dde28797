"""Two minutes of what `benchmarks/run.py soak` does for thirty, on a real model."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
LOADED = ["--max-batch-size", "8", "--max-queue-size", "16", "--request-deadline-s", "20"]
LOADED += ["--max-cache-bytes", "64MiB", "--num-blocks", "1024"]
FUZZED = ["--max-new-tokens", "8", "--max-prompt-tokens", "512"]


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """URL and process of a running server."""
    port = free_port()
    command = [sys.executable, "-m", "kvboost.server", "--port", str(port), "--dtype", "float32"]
    command += ["--model", real_model("SmolLM2-135M-Instruct")]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags], stderr=output)
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


def test_mixed_load_is_held(tmp_path: Path) -> None:
    load = ["--minutes", "2", "--clients", "32", "--questions", "16", "--burst-every", "20"]
    with serving(tmp_path / "log", *LOADED) as (url, pid):
        # Allocators still fill their caches in two minutes: the bound finds thorough leaks only.
        watch = ["--pid", str(pid), "--max-growth", "0.3"]
        assert soak.run(options_of(soak, url, *load, *watch))[0]["violations"] == []


def test_random_bodies_are_answered_or_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FUZZED) as (url, _):
        assert fuzz.run(options_of(fuzz, url, "--bodies", "1000"))[0]["violations"] == []


def options_of(module: ModuleType, url: str, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(["--url", url, *flags])
