"""madvise(2) without the GIL, which Python's `mmap.madvise` keeps while a disk delivers pages."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

WILLNEED, DONTNEED, POPULATE_READ = 3, 4, 22  # the last one from Linux 5.14 on


def madvise(address: int, num_bytes: int, advice: int) -> int:
    """Advise the system about pages; 0, or the number of the error."""
    return 0 if _libc().madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
