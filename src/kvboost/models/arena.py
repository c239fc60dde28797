"""Few rows of many requests in one memory, so that a step writes and reads them all at once."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kvboost.core import KVGeometry, Span
from kvboost.models.slots import KeyValue, SlotCache

FIRST_ROWS = ROW_STEP = 16
PLACE_STEP, GROWTH = 2, 64  # places and rows that are added at once, since all rows are copied

Writer: TypeAlias = Callable[[int, KeyValue], None]
"""Called with a layer and one fresh row for each of some caches [1, heads, caches, head_dim]."""

Reader: TypeAlias = Callable[[int], KeyValue]
"""Gives K and V of a layer of some caches, each [caches, heads, rows, head_dim]."""


class Arena(ABC):
    """Memory of several caches. They are given in the order of their places."""

    most_rows = 256  # of a cache; with more, attention to them dominates and nothing is gained

    @abstractmethod
    def writer(self, caches: Sequence[Any]) -> Writer:
        """What puts one fresh row behind those that each cache has, where room was made."""

    @abstractmethod
    def reader(self, caches: Sequence[Any], num_rows: int) -> Reader:
        """What gives the first rows of each cache; any numbers where it has fewer."""


class SlotArena(Arena):
    """Places in one buffer; it grows with their number and with the longest of them."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self._slots = SlotCache(geometry, FIRST_ROWS, device)
        self._users: weakref.WeakValueDictionary[int, SlotCache] = weakref.WeakValueDictionary()

    @property
    def num_rows(self) -> int:
        """Rows of each place."""
        return self._slots.capacity

    def take(self, num_rows: int) -> SlotCache:
        """An empty cache in a place of its own, which is free again when the cache is gone."""
        count = self._slots.batch_size
        place = next((i for i in range(count) if i not in self._users), count)
        if place == count or num_rows > self.num_rows:
            more = PLACE_STEP if place == count else 0
            self._resize(count + more, max(num_rows, self.num_rows))
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
            most = max(num_rows, min(self.num_rows + GROWTH, self.most_rows))
            self._resize(self._slots.batch_size, most)

    def writer(self, caches: Sequence[SlotCache]) -> Writer:
        """What puts one fresh row behind those that each cache has."""
        device = self._slots.device
        places = torch.tensor([cache.place for cache in caches], device=device)
        lengths = torch.tensor([cache.length for cache in caches], device=device)

        def write(layer: int, fresh: KeyValue) -> None:
            for stored, rows in zip(self._layer(layer), fresh, strict=True):
                stored[places, :, lengths] = rows[0].transpose(0, 1)

        return write

    def reader(self, caches: Sequence[SlotCache], num_rows: int) -> Reader:
        """What gives the first rows of each cache: views where their places are side by side."""
        numbers = [cache.place for cache in caches]
        places = torch.tensor(numbers, device=self._slots.device)
        is_run = numbers[-1] - numbers[0] + 1 == len(numbers)
        run = slice(numbers[0], numbers[-1] + 1) if is_run else None

        def read(layer: int) -> KeyValue:
            key, value = (stored[:, :, :num_rows] for stored in self._layer(layer))
            if run is not None:
                return key[run], value[run]
            return key.index_select(0, places), value.index_select(0, places)

        return read

    def _layer(self, index: int) -> KeyValue:
        layer = self._slots.layers[index]
        return layer.keys, layer.values

    def _resize(self, num_places: int, num_rows: int) -> None:
        num_rows = -(-num_rows // ROW_STEP) * ROW_STEP
        self._slots = self._slots.resized(num_places, num_rows)
        for place, user in self._users.items():
            user.move_to(self._slots.sequence(place))
