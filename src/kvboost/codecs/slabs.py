"""Memory for frames: many share a mapping, because the system limits the number of mappings."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from weakref import finalize

import numpy as np

from kvboost.madvise import DONTNEED, POPULATE_WRITE, madvise, reserve

SLAB_BYTES = 64 << 20


class _Slab:
    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        size_bytes = max(SLAB_BYTES, slot_bytes)
        self.memory = np.frombuffer(reserve(size_bytes), np.uint8)
        self.address = self.memory.ctypes.data
        self.free = list(range(0, size_bytes, slot_bytes))
        self.num_slots = len(self.free)


class Slabs:
    """Slots of memory in slabs, each for slots of one size. Thread-safe.

    Slots are powers of two, of which only the pages that were asked for are ever taken. They go
    back to the system when nobody refers to them any more; the allocator would keep pieces of
    them, and memory would grow beyond the store's budget.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._with_room: dict[int, dict[_Slab, None]] = {}  # by size of their slots
        self._returned: deque[tuple[_Slab, int]] = deque()  # whoever returns one may hold the lock

    def take(self, num_bytes: int) -> memoryview:
        """Memory full of zeros.

        Its pages are taken at once: one by one, as they are first written, costs more than a copy.
        """
        slot_bytes = max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            self._collect()
            slabs = self._with_room.setdefault(slot_bytes, {})
            slab = next(iter(slabs), None) or _Slab(slot_bytes)
            slabs[slab] = None
            start = slab.free.pop()
            if not slab.free:
                del slabs[slab]
        madvise(slab.address + start, num_bytes, POPULATE_WRITE)
        slot = slab.memory[start : start + num_bytes]
        finalize(slot, self._give_back, slab, start, num_bytes).atexit = False
        return slot.data

    def _give_back(self, slab: _Slab, start: int, num_bytes: int) -> None:
        madvise(slab.address + start, num_bytes, DONTNEED)
        self._returned.append((slab, start))

    def _collect(self) -> None:
        """Make returned slots usable again; unmap empty slabs, but for one of each size."""
        while self._returned:
            slab, start = self._returned.popleft()
            slab.free.append(start)
            slabs = self._with_room[slab.slot_bytes]
            slabs[slab] = None
            if len(slab.free) == slab.num_slots and len(slabs) > 1:
                del slabs[slab]
