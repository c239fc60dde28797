"""Clocks, medians, memory, and the facts that a figure needs beside it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

import kvboost
from kvboost.bench.machine import commit, cpu
from kvboost.bench.records import Line as Row

N, T = TypeVar("N"), TypeVar("T")


def turns(sides: Sequence[T], num_rounds: int) -> Iterator[tuple[int, T]]:
    """Every side once in a round, each round in the other order: a slow minute hits all alike."""
    for number in range(num_rounds):
        for side in sides if number % 2 else sides[::-1]:
            yield number, side


def by_turns(sides: Mapping[N, Callable[[int], T]], num_rounds: int) -> dict[N, list[T]]:
    """What each side gives when called with the number of a round.

    A round before the first, of number 0, warms up allocators, kernels and connections.
    """
    taken: dict[N, list[T]] = {name: [] for name in sides}
    for number, name in turns(list(sides), num_rounds + 1):
        taken[name].append(sides[name](number))
    return {name: given[1:] for name, given in taken.items()}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios: a slow minute hits both sides alike."""
    return round(float(np.median(np.divide(ours, theirs))), 4)


def median_ms(times_s: Sequence[float]) -> float:
    return round(1e3 * float(np.median(times_s)), 2)


class Peak:
    """The most that `read` has returned within the block, looked at on a thread."""

    def __init__(self, read: Callable[[], Any], every_s: float = 0.005) -> None:
        self.most = read()
        self._read, self._every_s = read, every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.most = max(self.most, self._read())


def memory_mb(kind: str = "VmRSS", pid: int | str = "self") -> float:
    """Memory of a process (Linux): VmRSS all of it, RssFile that of files, RssAnon the rest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has ended")


def resident_mb(pid: int) -> float:
    """Memory of a process and of all that it started."""
    try:
        own = memory_mb(pid=pid)
        listings = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0.0
    return own + sum(resident_mb(int(child)) for each in listings for child in each.split())


def in_process(script: Path, task: Row, before: Callable[[], None] | None = None) -> Row:
    """What a script that gets `task` as JSON prints as its last line, in a process of its own.

    `before` is called there before Python starts.
    """
    done = subprocess.run(
        [sys.executable, script, json.dumps(task)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=before,
    )
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def environment() -> Row:
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
