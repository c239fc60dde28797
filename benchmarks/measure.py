"""Clocks, medians and the facts that a figure needs beside it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import StoppingCriteria

import kvboost
from kvboost.bench.machine import commit, cpu


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Both medians, and the median of the rounds' ratios: a slow minute hits both sides alike."""
    return {
        "ours_ms": round(1e3 * statistics.median(ours), 2),
        "bare_ms": round(1e3 * statistics.median(theirs), 2),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4),
    }


class TokenClock(StoppingCriteria):
    """Notes when each token of a bare generate() was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds_per_token(self) -> float:
        return statistics.median(b - a for a, b in zip(self.times, self.times[1:], strict=False))


def in_process(script: Path, task: dict[str, Any]) -> dict[str, Any]:
    """What a script that gets `task` as JSON prints as its last line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, script, json.dumps(task)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def environment() -> dict[str, Any]:
    return {
        "kvboost": kvboost.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def rss_mb() -> float:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
