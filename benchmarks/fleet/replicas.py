"""What does routing by reuse keep, and what do deaths cost? Real Ray Serve, Redis and Mooncake."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common.material import dtype_name
from benchmarks.common.measure import Row, in_process

SCRIPT = Path(__file__).with_name("replicas_run.py")
PARTS = ("exact", "auto", "faults", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)


def run(options: argparse.Namespace) -> list[Row]:
    names = ("model", "requests", "clients", "parts")
    task = {name: getattr(options, name) for name in names} | {"dtype": dtype_name(options)}
    rows: list[Row] = in_process(SCRIPT, task)["rows"]
    return rows
