"""What does routing by reuse keep, and what do deaths cost? Real Ray Serve, Redis and Mooncake."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measure import in_process

SCRIPT = Path(__file__).with_name("fleet_run.py")
PARTS = ("exact", "auto", "faults", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    task = {"model": options.model[0], "requests": options.requests}
    task |= {"clients": options.clients, "parts": options.parts}
    rows: list[dict[str, Any]] = in_process(SCRIPT, task)["rows"]
    return rows
