"""Weights in files that are mapped into memory: the CPU computes on the file's own pages.

Nothing is copied. Pages are read and mapped before they are needed and unmapped after it; what the
machine has spare keeps them in its page cache, where they are found without reading the disk.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
import sys
from pathlib import Path

import torch

from kvboost.errors import ConfigError
from kvboost.weights.carrier import Brought, Carrier, Tensors

log = logging.getLogger(__name__)

# Of madvise(2); Python's `mmap` has no names for all of them and keeps the GIL meanwhile.
DONTNEED, WILLNEED, POPULATE_READ = 4, 3, 22
HUGE_PAGE = 1 << 21  # what a single access may map

MAPPING = re.compile(
    r"(?P<first>[0-9a-f]+)-(?P<last>[0-9a-f]+) ...(?P<kind>.) \S+ \S+ \S+ *(?P<name>.*)"
)
"""The line of /proc/PID/smaps that a mapping begins with."""


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
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._files = mapped_files()

    def can_drop(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a mapped file."""
        start, stop = _extent(tensor)
        return any(first <= start and stop <= last for first, last in self._files)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, with its pages in memory."""
        self.bring((tensor,))
        return tensor

    def bring(self, tensors: Tensors) -> Brought:
        """Read and map the pages; a forward that is faster than that waits in a page fault."""
        for tensor in tensors:
            start, stop = _extent(tensor)
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
            for advice in (WILLNEED, POPULATE_READ):
                if self._advise(start, stop - start, advice) != 0:
                    # Linux before 5.14 does not know POPULATE_READ: WILLNEED reads without mapping.
                    log.debug("madvise(%d): error %d", advice, ctypes.get_errno())
        return Brought(tensors)

    def await_arrival(self, brought: Brought) -> None:
        """Nothing to do: a page that is not there yet is waited for in a fault."""

    def note_use(self, brought: Brought) -> None:
        """Nothing to do: a CPU is done with a tensor when the call returns."""

    def drop(self, brought: Brought) -> None:
        """Unmap the pages, but for those at the ends that neighbours have a part of."""
        for tensor in brought.tensors:
            start, stop = _extent(tensor)
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self._advise(start, stop - start, DONTNEED)


def mapped_files() -> list[tuple[int, int]]:
    """Addresses (first, last + 1) of the private mappings of files that nobody wrote to.

    What was written exists in memory alone: to drop it would bring back the file's old numbers.
    """
    found, span = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = MAPPING.match(line)
        if head is not None:
            is_file = head["kind"] == "p" and head["name"].startswith("/")
            span = (int(head["first"], 16), int(head["last"], 16)) if is_file else (0, 0)
        elif line.startswith("Anonymous:") and line.split()[1] == "0" and span != (0, 0):
            found.append(span)
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one after the last."""
    start = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
