"""The clock of everything that is timed in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def now(device: torch.device | None = None) -> float:
    """The time, once a GPU has done what it was given."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds(work: Callable[[], object], device: torch.device | None = None) -> float:
    """What the work takes."""
    started = now(device)
    work()
    return now(device) - started
