"""What a figure was measured on; None where the system does not say."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

GROUP = Path("/sys/fs/cgroup")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu() -> str:
    """The processor's own name."""
    return cpu_field("model name") or platform.processor()


def cpu_field(name: str) -> str:
    """What Linux says of the first core; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


def commit() -> str:
    """The commit of the sources that run, "-dirty" if they were changed; empty without history."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip()


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
