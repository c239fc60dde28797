"""What each replica holds, by anchors, as far as this router knows.

A bit for every name and replica, in rows of names: what a prompt's anchors cost to look up does not
grow with what the replicas hold. See `Book.size_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt

ALL_NAMES = 2**64 - 1
MAX_ANCHORS = 1 << 20  # 17 million tokens
_Names = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Report:
    """All anchors held whose name is at most `limit`; of others nothing is said.

    A sample of what is held if that is much. All replicas sample the same names, so what two of
    them hold can be compared.
    """

    limit: int
    anchors: _Names

    def to_wire(self) -> dict[str, object]:
        """This report as values that JSON can hold."""
        return {"limit": self.limit, "anchors": self.anchors.astype("<u8").tobytes()}

    @classmethod
    def from_wire(cls, wire: object) -> Report | None:
        """What `to_wire` gave; None if it is something else."""
        if not isinstance(wire, Mapping):
            return None
        limit, anchors = wire.get("limit"), wire.get("anchors")
        if type(limit) is not int or not 0 <= limit <= ALL_NAMES:
            return None
        if not isinstance(anchors, bytes) or len(anchors) % 8:
            return None
        return cls(limit, np.frombuffer(anchors, "<u8").astype(np.uint64))


class Book:
    """What was sent to the replicas, and what they reported. For one thread.

    The least recently requested names are evicted for what is sent. A report only takes free
    rows: it may be large, and must not evict what requests ask for.
    """

    def __init__(self, max_anchors: int = MAX_ANCHORS) -> None:
        self._max_anchors = max_anchors
        self._rows: dict[int, int] = {}  # name -> row, the oldest first
        self._free_rows: list[int] = []
        self._names = np.zeros(0, np.uint64)  # of each row
        self._columns: dict[str, int] = {}  # replica -> bit in each row
        self._free_columns: list[int] = []
        self._held = np.zeros((0, 0), np.uint8)  # rows of bits
        self._is_fresh = np.zeros((0, 0), np.uint8)  # sent since the replica's last report
        self._limits = np.zeros(0, np.uint64)  # of the replicas' last reports

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def replicas(self) -> set[str]:
        """The replicas about which anything is known."""
        return set(self._columns)

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays; the names' table adds about 120 bytes for each name."""
        return self._names.nbytes + self._held.nbytes + self._is_fresh.nbytes

    def shares(self, anchors: _Names, *, in_order: bool) -> dict[str, float]:
        """The share of a prompt's anchors that each replica holds, of those that hold any.

        With `in_order` only those before the first that a replica does not hold: all that exact
        reuse can use. Anchors of which a replica's report says nothing are left out of account.
        """
        if not len(self._rows):
            return {}
        rows = self._rows_of(anchors)
        held = self._held[rows]
        held[rows < 0] = 0
        run, num_told = held, np.full(len(self._limits), len(anchors))
        if (self._limits < ALL_NAMES).any():
            is_untold = anchors[:, np.newaxis] > self._limits
            untold = np.packbits(is_untold, axis=1, bitorder="little") & ~held
            run, num_told = held | untold, num_told - _counts(untold)
        if in_order:
            held &= np.bitwise_and.accumulate(run, axis=0)
        num_held = _counts(held)
        shares = (num_held / np.maximum(num_told, 1)).tolist()
        return {
            replica: shares[column] for replica, column in self._columns.items() if shares[column]
        }

    def sent(self, anchors: _Names, replica: str) -> None:
        """Record that a prompt with these anchors was sent to a replica."""
        names = list(dict.fromkeys(anchors.tolist()))[: self._max_anchors]
        known = {name: self._rows.pop(name) for name in names if name in self._rows}
        self._rows.update(known)  # the newest now
        self._add([name for name in names if name not in known])
        rows = [self._rows[name] for name in names]
        byte, bit = self._place_of(replica)
        for bits in (self._held, self._is_fresh):
            bits[rows, byte] |= bit

    def reported(self, replica: str, report: Report) -> None:
        """Replace what is known of a replica by its report, except what was sent since the last.

        That may not have been stored yet.
        """
        rows = self._rows_of(report.anchors)
        room = self._max_anchors - len(self._rows)
        new_rows = self._add(np.unique(report.anchors[rows < 0])[:room].tolist())
        byte, bit = self._place_of(replica)
        held, fresh = self._held[:, byte], self._is_fresh[:, byte]
        before = held & bit
        held &= np.where(self._names <= np.uint64(report.limit), fresh | ~bit, ~np.uint8(0))
        held[rows[rows >= 0]] |= bit
        held[new_rows] |= bit
        fresh &= ~bit
        self._limits[self._columns[replica]] = report.limit
        self._free_unheld(np.flatnonzero(before & ~held))

    def forget(self, replica: str) -> None:
        """Forget a replica and all that it held."""
        if replica not in self._columns:
            return
        byte, bit = self._place_of(replica)
        rows = np.flatnonzero(self._held[:, byte] & bit)
        for bits in (self._held, self._is_fresh):
            bits[:, byte] &= ~bit
        self._free_unheld(rows)
        self._free_columns.append(self._columns.pop(replica))

    def _rows_of(self, anchors: _Names) -> npt.NDArray[np.int64]:
        """The row of each name, -1 if it has none."""
        found = map(self._rows.get, anchors.tolist(), repeat(-1))
        return np.fromiter(found, np.int64, len(anchors))

    def _add(self, names: list[int]) -> list[int]:
        """Give new names a row each; the oldest names leave if there are too many."""
        num_leaving = max(0, len(self._rows) + len(names) - self._max_anchors)
        self._free([self._rows[name] for name in islice(self._rows, num_leaving)])
        while len(self._free_rows) < len(names):
            self._grow_rows()
        rows = [self._free_rows.pop() for _ in names]
        self._names[rows] = np.array(names, np.uint64)
        self._rows.update(zip(names, rows, strict=True))
        return rows

    def _free(self, rows: list[int]) -> None:
        for name in self._names[rows].tolist():
            del self._rows[name]
        self._held[rows] = 0
        self._free_rows.extend(rows)

    def _free_unheld(self, rows: npt.NDArray[np.int64]) -> None:
        """Free the rows among these that no replica holds any more."""
        self._free(rows[~self._held[rows].any(axis=1)].tolist())

    def _grow_rows(self) -> None:
        known = len(self._names)
        size = min(self._max_anchors, max(1024, 2 * known))
        self._free_rows.extend(range(size - 1, known - 1, -1))
        self._names = np.pad(self._names, (0, size - known))
        self._held, self._is_fresh = (
            np.pad(bits, ((0, size - known), (0, 0))) for bits in (self._held, self._is_fresh)
        )

    def _place_of(self, replica: str) -> tuple[int, np.uint8]:
        """The byte of each row and the bit in it that stand for a replica."""
        if replica not in self._columns:
            column = self._free_columns.pop() if self._free_columns else len(self._columns)
            if column >= 8 * self._held.shape[1]:
                self._held, self._is_fresh = (
                    np.pad(bits, ((0, 0), (0, 1))) for bits in (self._held, self._is_fresh)
                )
                self._limits = np.pad(self._limits, (0, 8), constant_values=ALL_NAMES)
            self._limits[column] = ALL_NAMES
            self._columns[replica] = column
        column = self._columns[replica]
        return column // 8, np.uint8(1 << column % 8)


def _counts(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """How often each bit is set in some rows."""
    each = np.unpackbits(bits, axis=1, bitorder="little")
    counts: npt.NDArray[np.uint32] = each.sum(axis=0, dtype=np.uint32)
    return counts
