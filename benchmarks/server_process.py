"""What the operating system knows of a running server (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def resident_mb(pid: int) -> float:
    """Memory of a process and of all that it started."""
    return sum(_own_mb(each) for each in (pid, *_descendants(pid)))


def _own_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _descendants(pid: int) -> list[int]:
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listing.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [each for child in children for each in (child, *_descendants(child))]
    return found
