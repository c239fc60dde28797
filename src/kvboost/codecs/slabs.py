"""Memory for frames: many share a mapping, because the system limits the number of mappings."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from weakref import finalize

import numpy as np

from kvboost.madvise import DONTNEED, POPULATE_WRITE, madvise, reserve

SLAB_BYTES = 64 << 20
MOST_WARM = 4  # returned slots of a size that keep their pages


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

    Slots are powers of two, of which only the pages that were asked for are ever taken. These go
    back to the system when nobody refers to a slot any more: the allocator would keep pieces of
    them, and memory would grow beyond the store's budget. The last few slots keep theirs, because
    taking pages costs more than a copy: a new chunk in a full memory gets those of an evicted one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._with_room: dict[int, dict[_Slab, None]] = {}  # by size of their slots
        self._warm: dict[int, deque[tuple[_Slab, int]]] = {}
        self._returned: deque[tuple[_Slab, int]] = deque()  # whoever returns one may hold the lock

    def take(self, num_bytes: int) -> memoryview:
        """Memory for somebody who writes all of it: an earlier frame may be there.

        Its pages are taken at once: one by one, as they are first written, costs more than a copy.
        """
        slot_bytes = max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            warm = self._warm.setdefault(slot_bytes, deque())
            slab, start = warm.pop() if warm else self._cold(slot_bytes)
        used_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise(slab.address + start + used_bytes, slot_bytes - used_bytes, DONTNEED)
        madvise(slab.address + start, used_bytes, POPULATE_WRITE)
        slot = slab.memory[start : start + num_bytes]
        finalize(slot, self._give_back, slab, start).atexit = False
        return slot.data

    def _cold(self, slot_bytes: int) -> tuple[_Slab, int]:
        self._collect()
        slabs = self._with_room.setdefault(slot_bytes, {})
        slab = next(iter(slabs), None) or _Slab(slot_bytes)
        slabs[slab] = None
        start = slab.free.pop()
        if not slab.free:
            del slabs[slab]
        return slab, start

    def _give_back(self, slab: _Slab, start: int) -> None:
        warm = self._warm[slab.slot_bytes]
        if len(warm) < MOST_WARM:
            warm.append((slab, start))
        else:
            madvise(slab.address + start, slab.slot_bytes, DONTNEED)
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
