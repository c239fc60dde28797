"""`madvise` without the GIL, which Python's `mmap` holds while a disk delivers pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

WILLNEED, DONTNEED = 3, 4
POPULATE_READ, POPULATE_WRITE = 22, 23  # from Linux 5.14 on
_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def reserve(num_bytes: int) -> mmap.mmap:
    """Zeroed memory whose pages are allocated as they are written.

    The system does not count it before: otherwise two pools of half the memory would be too large a
    mapping for `fork`.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # blocks and frames are returned page by page
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def madvise(address: int, num_bytes: int, advice: int) -> int:
    """Advise the system about pages; 0, or the number of the error."""
    return 0 if libc().madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()


@cache
def libc() -> Any:
    """The C library, with `madvise`, `mmap` and `munmap` declared."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise.argtypes = (pointer, size, number)
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    return libc
