"""A hash map from 64-bit numbers to 64-bit numbers, for indexes of millions of entries.

A Python dict spends about 110 bytes on such a pair; here it is 16 bytes and the free slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FULL_RATIO = 0.85  # share of taken slots at which the table grows
GROWTH = 1.5
FIRST_SLOTS = 64


class NumberTable:
    """Open addressing with linear probing. Keys must be well mixed; 0 and 1 are reserved."""

    _FREE, _GONE = 0, 1

    def __init__(
        self, are_current: Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.bool_]] | None = None
    ) -> None:
        """Pairs with an outdated value are dropped when the table is rebuilt."""
        self._are_current = are_current
        self._allocate(FIRST_SLOTS)
        self._num_used = 0  # slots that are not free, those of removed keys included
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    @property
    def size_bytes(self) -> int:
        """Memory of all slots."""
        return self._keys.nbytes + self._values.nbytes

    def get(self, key: int) -> int | None:
        """The value of `key`."""
        slot = self._find(key)
        return None if slot is None else self._values_view[slot]

    def put(self, key: int, value: int) -> None:
        """Set the value of `key`."""
        if self._num_used >= FULL_RATIO * len(self._keys):
            self._rebuild()
        keys, size = self._keys_view, len(self._keys_view)
        slot, gone = key % size, None
        while (there := keys[slot]) != self._FREE:
            if there == key:
                self._values_view[slot] = value
                return
            if there == self._GONE and gone is None:
                gone = slot
            slot = (slot + 1) % size
        if gone is None:
            self._num_used += 1
        else:
            slot = gone
        self._num_keys += 1
        keys[slot], self._values_view[slot] = key, value

    def remove(self, key: int) -> None:
        """Forget `key` if it is there."""
        slot = self._find(key)
        if slot is not None:
            self._keys_view[slot] = self._GONE
            self._num_keys -= 1

    def _find(self, key: int) -> int | None:
        keys, size = self._keys_view, len(self._keys_view)
        slot = key % size
        while (there := keys[slot]) != self._FREE:
            if there == key:
                return slot
            slot = (slot + 1) % size
        return None

    def _allocate(self, num_slots: int) -> None:
        self._keys = np.zeros(num_slots, dtype=np.uint64)
        self._values = np.zeros(num_slots, dtype=np.uint64)
        # Reading one number through a memoryview takes half the time of reading it from an array.
        self._keys_view, self._values_view = self._keys.data, self._values.data

    def _rebuild(self) -> None:
        taken = self._keys > self._GONE
        if self._are_current is not None:
            taken[taken] = self._are_current(self._values[taken])
        keys, values = self._keys[taken], self._values[taken]
        crowded = len(keys) > FULL_RATIO / GROWTH * len(self._keys)
        self._allocate(int(len(self._keys) * (GROWTH if crowded else 1)))
        self._num_used = self._num_keys = len(keys)
        # All keys at once: each round puts those that find their slot free, the rest move on.
        slots = keys % np.uint64(len(self._keys))
        left = np.arange(len(keys))
        while len(left):
            at = slots[left].astype(np.int64)
            free = self._keys[at] == self._FREE
            self._keys[at[free]] = keys[left[free]]  # of several for one slot the last one stays
            settled = self._keys[at] == keys[left]
            self._values[at[settled]] = values[left[settled]]
            left = left[~settled]
            slots[left] = (slots[left] + np.uint64(1)) % np.uint64(len(self._keys))
