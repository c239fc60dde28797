"""Fail the n-th call that the disk tier makes of the system, or all from the n-th on."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from types import FrameType
from typing import Any

import pytest

from kvboost.tiers.disk import folder, log, segment

SYSTEM = (
    *("open", "close", "stat", "fstat", "mkdir", "scandir", "unlink", "replace"),
    *("pread", "write", "pwrite", "fsync", "ftruncate", "posix_fallocate"),
)
ERRORS: dict[str, Callable[[], Exception]] = {
    "EIO": lambda: OSError(errno.EIO, "injected"),
    "ENOSPC": lambda: OSError(errno.ENOSPC, "injected"),
    "memory": lambda: MemoryError("injected"),
}


class Calls:
    """Counts calls, and fails those it is told to."""

    def __init__(self) -> None:
        self.num, self.first, self.last = 0, 0, 0
        self.error = ERRORS["EIO"]
        self.failed: list[str] = []

    def fail(self, first: int, *, forever: bool, error: str) -> None:
        """Count from 1 again; `first` fails, and all behind it if it is to be `forever`."""
        self.num, self.first, self.last = 0, first, 10**9 if forever else first
        self.error, self.failed = ERRORS[error], []

    def heal(self) -> None:
        """Fail nothing more."""
        self.last = 0

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not _is_of_disk_tier():
                return call(*args, **kwargs)
            self.num += 1
            error = self.error()
            is_told = self.first <= self.num <= self.last
            if not is_told or (name == "close" and isinstance(error, MemoryError)):
                return call(*args, **kwargs)  # closing takes no memory
            self.failed.append(name)
            if name == "close":  # the descriptor is gone, whatever the system says
                call(*args, **kwargs)
            if name in ("write", "pwrite"):  # a part of it arrives
                call(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            raise error

        return counted


def _is_of_disk_tier() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals["__name__"].startswith("kvboost.tiers.disk"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """All calls of the disk tier, of any thread."""
    calls = Calls()

    class File(FileIO):
        readall = calls.wrap("readall", FileIO.readall)
        read = calls.wrap("read", FileIO.read)

    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM:
            patch.setattr(os, name, calls.wrap(name, getattr(os, name)))
        patch.setattr(fcntl, "flock", calls.wrap("flock", fcntl.flock))
        patch.setattr(segment, "_map", calls.wrap("mmap", segment._map))
        for module in (folder, log, segment):
            patch.setattr(module, "FileIO", File)
        yield calls
