"""Weights in files that are mapped into memory: the CPU computes on the file's own pages.

Nothing is copied. Pages are read and mapped before they are needed and unmapped after it; what the
machine has spare keeps them in its page cache, where they are found without reading the disk.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kvboost.errors import ConfigError
from kvboost.madvise import DONTNEED, POPULATE_READ, WILLNEED, madvise
from kvboost.weights.carrier import Brought, Carrier, Tensors

HUGE_PAGE = 1 << 21  # what a single access may map

MAPPING = re.compile(
    r"(?P<first>[0-9a-f]+)-(?P<last>[0-9a-f]+) ...(?P<kind>.) (?P<offset>[0-9a-f]+) \S+ \S+ *"
    r"(?P<name>.*)"
)
"""The line of /proc/PID/smaps that a mapping begins with."""


@dataclass(frozen=True)
class MappedFile:
    """A file, or a part of it, and its addresses."""

    path: str
    offset: int
    first: int
    last: int  # the address after it


class MappedPages(Carrier):
    """Brings and drops pages of mapped files."""

    device = torch.device("cpu")
    is_in_place = True

    def __init__(self) -> None:
        """Find the mapped files of this process.

        Raises:
            ConfigError: this system cannot do it.
        """
        if sys.platform != "linux":
            raise ConfigError("weights can be streamed from files on Linux only")
        self._files = mapped_files()
        self._known: set[int] = set()  # where pieces begin that were read before
        self.is_cache_short = False  # the system's cache did not keep what we read

    def can_drop(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a mapped file."""
        return self._file_of(*_extent(tensor)) is not None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, with its pages in memory."""
        self.bring((tensor,))
        return tensor

    def bring(self, tensors: Tensors) -> Brought:
        """Read and map the pages."""
        for tensor in tensors:
            start, stop = _extent(tensor)
            num_read = bytes_from_disk()
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            if madvise(first, stop - first, POPULATE_READ) != 0:
                madvise(first, stop - first, WILLNEED)  # all that Linux before 5.14 can do
            if start in self._known and bytes_from_disk() - num_read > (stop - start) // 2:
                self.is_cache_short = True
            self._known.add(start)
        return Brought(tensors)

    def await_arrival(self, brought: Brought) -> None:
        """Nothing to do: a page that is not there yet is waited for in a fault."""

    def note_use(self, brought: Brought) -> None:
        """Nothing to do: a CPU is done with a tensor when the call returns."""

    def drop(self, brought: Brought) -> None:
        """Unmap the pages, but for those at the ends that neighbours have a part of.

        Where memory is too short to keep them in the system's cache until the next forward, they
        leave it at once: to look for pages that can go costs the system as much as reading them.
        """
        for tensor in brought.tensors:
            start, stop = _extent(tensor)
            file = self._file_of(start, stop)
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
            if file is None or start >= stop:
                continue
            madvise(start, stop - start, DONTNEED)
            if self.is_cache_short:
                _forget(file, start, stop)

    def _file_of(self, start: int, stop: int) -> MappedFile | None:
        return next((f for f in self._files if f.first <= start and stop <= f.last), None)


def mapped_files() -> list[MappedFile]:
    """The private mappings of files that nobody wrote to.

    What was written exists in memory alone: to drop it would bring back the file's old numbers.
    """
    found: list[MappedFile] = []
    current: MappedFile | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = MAPPING.match(line)
        if head is not None:
            first, last, offset = (int(head[each], 16) for each in ("first", "last", "offset"))
            is_file = head["kind"] == "p" and head["name"].startswith("/")
            current = MappedFile(head["name"], offset, first, last) if is_file else None
        elif line.startswith("Anonymous:") and line.split()[1] == "0" and current is not None:
            found.append(current)
    return found


def bytes_from_disk() -> int:
    """Bytes that this thread has read from disks so far."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def _forget(file: MappedFile, start: int, stop: int) -> None:
    """Let the system's cache forget a part of a file."""
    try:
        number = os.open(file.path, os.O_RDONLY)
    except OSError:  # moved or deleted meanwhile
        return
    try:
        at = file.offset + start - file.first
        os.posix_fadvise(number, at, stop - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one after the last."""
    start = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
