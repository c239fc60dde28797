"""What the system says about itself; None where it does not."""

from __future__ import annotations

import os
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")


def num_cores(group: Path = GROUP) -> int:
    """Cores that this process may use, within the limit of a container."""
    is_told = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if is_told else num_machine_cores()
    try:
        quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no container, or one without a limit
        return allowed
    return min(allowed, -(-quota // period))


def num_machine_cores() -> int:
    """Cores of the machine."""
    return os.cpu_count() or 1


def load() -> float | None:
    """Mean number of running processes in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def available_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = GROUP) -> int | None:
    """Memory that could be used now, within the limit of a container."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit
        return available
    return min(available, max(0, limit - used))
