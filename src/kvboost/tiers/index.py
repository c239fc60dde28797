"""The index of stored chunks: finds one by its key, by the chunk before it, or by anchors.

Stored in columns, because it has a row for every stored chunk: see `size_bytes`.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import count, islice
from typing import cast

import numpy as np
import numpy.typing as npt

from kvboost.codecs.frame import OWNER_BYTES
from kvboost.core import (
    TOKEN_BYTES,
    Anchor,
    ContentKey,
    Entry,
    FrameKey,
    Namespace,
    Owner,
    PrefixKey,
    Provenance,
    StoreListener,
)
from kvboost.tiers import anchors
from kvboost.tiers.table import NumberTable

KEY_BYTES = 32
# An anchor's value: row, how often the row had been freed, offset in the chunk.
_ROUND_BITS = _OFFSET_BITS = 16
_SEVERAL = 1 << 63  # marks a value of the table of children as the index of a list
LEAST_BYTES = 8 * TOKEN_BYTES  # shorter chunks occur in any text
MOST_COPIES = 4  # of the same text that its anchors lead to
_NEXT_COPY = 0xD1342543DE82EF95  # keeps the names of copies far apart


class ChunkIndex:
    """A row for each stored chunk. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._keys = bytearray()
        self._tokens: list[bytes | None] = []  # None: the row is free
        self._parents = array("Q")  # number of the chunk before it, 0 if it has none
        self._homes = array("I")
        self._spaces = array("I")
        self._rounds = array("H")
        self._is_exact = bytearray()
        self._free_rows: list[int] = []
        self._known_spaces: dict[int, Namespace] = {}
        self._space_numbers: dict[Namespace, int] = {}
        self._space_sizes: Counter[int] = Counter()  # entries, by number
        self._new_numbers = count()
        self._rows = NumberTable()  # number of a key -> row
        # Number of a chunk -> row of the chunk after it. Where several follow: the index of their
        # list, sorted by tokens, so that the nearest to given tokens is next to where they'd go.
        self._children = NumberTable()
        self._families: list[array[int]] = []
        self._free_families: list[int] = []
        self._anchors = NumberTable(self._are_current)
        self._listeners: list[StoreListener] = []

    def __len__(self) -> int:
        return len(self._tokens) - len(self._free_rows)

    @property
    def size_bytes(self) -> int:
        """Memory of the index without the tokens themselves."""
        columns = (self._parents, self._homes, self._spaces, self._rounds, *self._families)
        tables = (self._rows, self._children, self._anchors)
        return (
            len(self._keys)
            + len(self._is_exact)
            + 8 * (len(self._tokens) + len(self._families))
            + sum(column.itemsize * len(column) for column in columns)
            + sum(table.size_bytes for table in tables)
        )

    def watch(self, listener: StoreListener) -> None:
        """Tell `listener` of every chunk that is here, and from now on of all that come and go."""
        with self._lock:
            for row, said in enumerate(self._tokens):
                if said is not None:
                    entry = self._entry(row)
                    listener.added(entry.key, said, entry.parent)
            self._listeners.append(listener)

    def get(self, key: FrameKey) -> Entry | None:
        """The entry stored under `key`."""
        with self._lock:
            row = self._row(key)
            return None if row is None else self._entry(row)

    def add(self, entry: Entry, anchors_in_it: Iterable[Anchor] = ()) -> None:
        """Make an entry findable; `anchors_in_it` come from `anchors.pick`.

        Of entries that say the same a few are found by their words: the oldest ones and the
        newest, exact ones before others. An entry that is known is given the anchors that lead
        nowhere now, and is replaced if it was computed at another position.
        """
        with self._lock:
            row = self._row(entry.key)
            if row is not None and self._homes[row] != entry.home:
                self.remove(entry.key)
                row = None
            if row is None:
                row = self._take_row(entry)
                self._rows.put(_number(entry.key), row)
                if entry.parent is not None:
                    self._add_child(_number(entry.parent), row)
                for listener in self._listeners:
                    listener.added(entry.key, entry.tokens, entry.parent)
            for offset, anchor in anchors_in_it:
                if (name := self._free_name(anchor, row)) is not None:
                    self._anchors.put(name, self._anchor_value(row, offset))

    def remove(self, key: FrameKey) -> None:
        """Remove an entry, if it is there; chunks after it are out of reach until it is back."""
        with self._lock:
            row = self._row(key)
            if row is None:
                return
            self._rows.remove(_number(key))
            if self._parents[row]:
                self._remove_child(self._parents[row], row)
            self._leave_space(self._spaces[row])
            self._tokens[row] = None
            self._rounds[row] = (self._rounds[row] + 1) % 2**_ROUND_BITS
            self._free_rows.append(row)
            for listener in self._listeners:
                listener.removed(key)

    def sightings(self, anchor: int, space: Namespace) -> list[tuple[Entry, int]]:
        """Chunks that an anchor leads to, with offsets; the caller compares the tokens."""
        with self._lock:
            found = [self._anchored(name) for name in _names(anchor)]
            return [
                (self._entry(row), offset)
                for row, offset in filter(None, found)
                if self._known_spaces[self._spaces[row]] == space
            ]

    def knows(self, tokens: npt.NDArray[np.uint32], space: Namespace) -> bool:
        """Whether any part of a text seems to be stored."""
        _, hashes = anchors.pick(tokens, anchors.salt(space))
        return any(self.sightings(anchor, space) for anchor in hashes.tolist())

    def spaces(self) -> list[Namespace]:
        """All namespaces of which something is stored."""
        return list(self._space_numbers)

    def owned_by(self, owners: Collection[Owner]) -> list[FrameKey]:
        """The keys of all entries of some owners."""
        with self._lock:
            numbers = {n for s, n in self._space_numbers.items() if s[:OWNER_BYTES] in owners}
            rows = enumerate(self._tokens) if numbers else ()
            return [
                self._key(row)
                for row, said in rows
                if said is not None and self._spaces[row] in numbers
            ]

    def entries(self, space: Namespace, limit: int) -> list[Entry]:
        """Some of the entries of a namespace, at most `limit`."""
        with self._lock:
            number = self._space_numbers.get(space)
            rows = (
                row
                for row, said in enumerate(self._tokens)
                if said is not None and self._spaces[row] == number
            )
            return [self._entry(row) for row in islice(rows, limit)]

    def within(self, text: bytes, space: Namespace) -> list[FrameKey]:
        """The keys of all entries whose tokens are part of a text, except very short ones."""
        with self._lock:
            number, known = self._space_numbers.get(space), list(self._tokens)
            own = [row for row, each in enumerate(self._spaces) if each == number]
        offsets = range(0, len(text) - LEAST_BYTES + 1, TOKEN_BYTES)
        starts = {text[at : at + LEAST_BYTES] for at in offsets}
        rows = [
            row
            for row in own
            if (said := known[row]) is not None
            and said[:LEAST_BYTES] in starts
            and _stands_in(said, text)
        ]
        with self._lock:
            return [
                self._key(row)
                for row in rows
                if self._tokens[row] is known[row] and self._spaces[row] == number
            ]

    def before(self, entry: Entry) -> Entry | None:
        """The chunk that an entry was computed after."""
        return None if entry.parent is None else self.get(entry.parent)

    def nearest_child(self, parent: FrameKey, tokens: bytes) -> tuple[Entry | None, int]:
        """The chunk after `parent` that shares most leading tokens with `tokens`, and how many."""
        best, most = None, 0
        with self._lock:
            rows = self._children_of(_number(parent))
            at = self._insertion_point(rows, tokens)
            for row in rows[max(0, at - 1) : at + 1]:
                num_shared = shared_head(self._said(row), tokens)
                if num_shared > most:
                    best, most = row, num_shared
            return (None if best is None else self._entry(best)), most

    def extension(self, parent: FrameKey, tokens: bytes) -> Entry | None:
        """A chunk after `parent` that starts with all of `tokens`, if there is one."""
        entry, _ = self.nearest_child(parent, tokens)
        return entry if entry is not None and entry.tokens.startswith(tokens) else None

    def childless_head(self, parent: FrameKey, tokens: bytes) -> FrameKey | None:
        """The chunk sorted just before `tokens`, if it is their head and nothing builds on it."""
        with self._lock:
            rows = self._children_of(_number(parent))
            at = self._insertion_point(rows, tokens)
            if at == 0 or not tokens.startswith(self._said(rows[at - 1])):
                return None
            key = self._key(rows[at - 1])
            return None if self._children_of(_number(key)) else key

    def _row(self, key: FrameKey) -> int | None:
        row = self._rows.get(_number(key))
        return row if row is not None and self._key(row) == key else None

    def _key(self, row: int) -> FrameKey:
        return cast("FrameKey", bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def _said(self, row: int) -> bytes:
        tokens = self._tokens[row]
        assert tokens is not None
        return tokens

    def _entry(self, row: int) -> Entry:
        before = self._rows.get(self._parents[row]) if self._parents[row] else None
        key, is_exact = self._key(row), bool(self._is_exact[row])
        return Entry(
            tokens=self._said(row),
            provenance=Provenance.EXACT if is_exact else Provenance.APPROXIMATE,
            prefix=PrefixKey(key) if is_exact else None,
            content=None if is_exact else ContentKey(key),
            parent=None if before is None else self._key(before),
            home=self._homes[row],
            space=self._known_spaces[self._spaces[row]],
        )

    def _take_row(self, entry: Entry) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = len(self._tokens)
            self._tokens.append(None)
            self._keys.extend(bytes(KEY_BYTES))
            self._is_exact.append(0)
            for column in (self._parents, self._homes, self._spaces, self._rounds):
                column.append(0)
        self._tokens[row] = entry.tokens
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = entry.key
        self._parents[row] = 0 if entry.parent is None else _number(entry.parent)
        self._homes[row] = entry.home
        self._spaces[row] = self._space_number(entry.space)
        self._space_sizes[self._spaces[row]] += 1
        self._is_exact[row] = entry.provenance is Provenance.EXACT
        return row

    def _space_number(self, space: Namespace) -> int:
        if space not in self._space_numbers:
            number = next(self._new_numbers)
            self._space_numbers[space], self._known_spaces[number] = number, space
        return self._space_numbers[space]

    def _leave_space(self, number: int) -> None:
        """Forget a namespace with its last entry."""
        self._space_sizes[number] -= 1
        if not self._space_sizes[number]:
            del self._space_sizes[number]
            del self._space_numbers[self._known_spaces.pop(number)]

    def _children_of(self, parent: int) -> array[int]:
        value = self._children.get(parent)
        if value is None:
            return array("I")
        return self._families[value ^ _SEVERAL] if value & _SEVERAL else array("I", [value])

    def _insertion_point(self, rows: array[int], tokens: bytes) -> int:
        return bisect_left(rows, tokens, key=self._said)

    def _add_child(self, parent: int, row: int) -> None:
        value = self._children.get(parent)
        if value is None:
            self._children.put(parent, row)
            return
        if not value & _SEVERAL:
            if not self._free_families:
                self._free_families.append(len(self._families))
                self._families.append(array("I"))
            at = self._free_families.pop()
            self._families[at].append(value)
            value = _SEVERAL | at
            self._children.put(parent, value)
        family = self._families[value ^ _SEVERAL]
        family.insert(self._insertion_point(family, self._said(row)), row)

    def _remove_child(self, parent: int, row: int) -> None:
        value, family = self._children.get(parent), self._children_of(parent)
        family.remove(row)
        if not family:
            self._children.remove(parent)
            if value is not None and value & _SEVERAL:
                self._free_families.append(value ^ _SEVERAL)

    def _anchor_value(self, row: int, offset: int) -> int:
        return (row << _ROUND_BITS | self._rounds[row]) << _OFFSET_BITS | offset

    def _free_name(self, anchor: int, row: int) -> int | None:
        """The name of an anchor that is to lead to a row; None if one does, or none may."""
        names = _names(anchor)
        others = [self._anchored(name) for name in names]
        if any(other is not None and other[0] == row for other in others):
            return None
        for name, other in zip(names, others, strict=True):
            if other is None or self._is_exact[row] > self._is_exact[other[0]]:
                return name
        return names[-1] if self._is_exact[row] else None

    def _anchored(self, anchor: int) -> tuple[int, int] | None:
        """Row and offset that an anchor leads to, unless the row was freed since."""
        value = self._anchors.get(anchor)
        if value is None:
            return None
        row, offset = value >> (_ROUND_BITS + _OFFSET_BITS), value % 2**_OFFSET_BITS
        return (row, offset) if value == self._anchor_value(row, offset) else None

    def _are_current(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        rows = (values >> np.uint64(_ROUND_BITS + _OFFSET_BITS)).astype(np.int64)
        rounds = (values >> np.uint64(_OFFSET_BITS)).astype(np.uint16)
        now = np.frombuffer(self._rounds, dtype=np.uint16)[rows]
        current: npt.NDArray[np.bool_] = now == rounds
        return current


def shared_head(left: bytes, right: bytes) -> int:
    """How many tokens two texts have in common from their starts on."""
    length = min(len(left), len(right)) // TOKEN_BYTES
    a, b = (np.frombuffer(side, dtype="<u4", count=length) for side in (left, right))
    return _first_difference(a, b)


def shared_tail(left: bytes, right: bytes) -> int:
    """How many tokens two texts have in common back from their ends."""
    length = min(len(left), len(right)) // TOKEN_BYTES
    a, b = (np.frombuffer(side, dtype="<u4")[::-1][:length] for side in (left, right))
    return _first_difference(a, b)


def _first_difference(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> int:
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)


def _stands_in(said: bytes, text: bytes) -> bool:
    at = text.find(said)
    while at > 0 and at % TOKEN_BYTES:
        at = text.find(said, at + 1)
    return at >= 0


def _names(anchor: int) -> list[int]:
    """The keys of an anchor in the table, one for each copy of its words."""
    return [max(2, (anchor + copy * _NEXT_COPY) % 2**64) for copy in range(MOST_COPIES)]


def _number(key: bytes) -> int:
    """64 bits of a key, as the tables want them."""
    return max(2, int.from_bytes(key[:8], "little"))
