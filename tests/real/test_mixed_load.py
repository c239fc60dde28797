"""Two minutes of what `benchmarks/run.py soak` does for thirty, on a real model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.serving import soak
from servers import kvboost_server

pytestmark = [pytest.mark.model, pytest.mark.servers, pytest.mark.long]

FLAGS = ["--dtype", "float32", "--max-batch-size", "8", "--max-queue-size", "16"]
FLAGS += ["--request-deadline-s", "20", "--max-cache-bytes", "64MiB", "--num-blocks", "1024"]


def test_mixed_load_is_held(smol: str, tmp_path: Path) -> None:
    load = ["--minutes", "2", "--clients", "32", "--questions", "16", "--burst-every", "20"]
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    with kvboost_server(smol, tmp_path / "log", *FLAGS) as server:
        # In two minutes the store may still be filling, with 5 % of the whole at most, and
        # allocators with it: this finds leaks of a megabyte in a few requests, not small ones.
        watch = ["--pid", str(server.process.pid), "--max-growth", "0.15"]
        row = soak.run(parser.parse_args(["--url", server.url, *load, *watch]))[0]
        assert row["violations"] == []
        assert "Traceback" not in server.log.read_text()
