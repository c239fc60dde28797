"""Few rows of many requests in one buffer, so that a step writes and reads them all at once."""

from __future__ import annotations

import weakref

import torch

from kvboost.core import KVGeometry, Span
from kvboost.models.slots import SlotCache

FIRST_ROWS, ROW_STEP = 64, 64


class Arena:
    """Places for requests' own rows; grows with their number and with the longest of them."""

    most_rows = 256  # of a request; with more, attention to them dominates and nothing is gained

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self._slots = SlotCache(geometry, FIRST_ROWS, device)
        self._users: weakref.WeakValueDictionary[int, SlotCache] = weakref.WeakValueDictionary()

    @property
    def num_rows(self) -> int:
        """Rows of each place."""
        return self._slots.capacity

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, of all places."""
        layer = self._slots.layers[index]
        return layer.keys, layer.values

    def take(self, num_rows: int) -> SlotCache:
        """An empty cache in a place of its own, which is free again when the cache is gone."""
        count = self._slots.batch_size
        place = next((i for i in range(count) if i not in self._users), count)
        if place == count or num_rows > self.num_rows:
            self._resize(max(count, 2 * place), max(num_rows, self.num_rows))
        taken = self._slots.sequence(place)
        taken.arena, taken.place = self, place
        for plane in taken.read(Span(0, self.num_rows)):
            plane.zero_()  # if the last one here had no numbers but NaN, masks would not hide it
        self._users[place] = taken
        return taken

    def leave(self, user: SlotCache) -> None:
        """Let a cache go on without its place."""
        del self._users[user.place]
        user.arena = None

    def make_room(self, num_rows: int) -> None:
        """Let every place have at least that many rows."""
        if num_rows > self.num_rows:
            self._resize(self._slots.batch_size, num_rows)

    def _resize(self, num_places: int, num_rows: int) -> None:
        num_rows = -(-num_rows // ROW_STEP) * ROW_STEP
        self._slots = self._slots.resized(num_places, num_rows)
        for place, user in self._users.items():
            user.move_to(self._slots.sequence(place))
