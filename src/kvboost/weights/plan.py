"""Which pieces of weights stay in memory, and how much room the others share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.errors import ConfigError

PIECES_IN_BUDGET = 16  # a linear layer that is larger than that part of the budget is cut
PIECES_IN_WINDOW = 4  # one in use, one that comes next, and slack for uneven sizes


@dataclass(frozen=True)
class Plan:
    """What stays, and the room of the window in which the rest comes and goes."""

    resident: frozenset[int]
    window_bytes: int


def piece_bytes(max_weight_bytes: int) -> int:
    """How large a piece of a weight that can be cut may be."""
    return max(1, max_weight_bytes // PIECES_IN_BUDGET)


def plan(sizes: Sequence[int], fixed_bytes: int, max_weight_bytes: int) -> Plan:
    """Divide a budget between pieces in the order of use; `fixed_bytes` are held anyway.

    A forward of a dense model needs each piece once, so none is worth more than its bytes. Those
    that stay are spread evenly: while they are computed with, others can come.

    Raises:
        ConfigError: the budget is too small.
    """
    room = max_weight_bytes - fixed_bytes
    if sum(sizes) <= room:
        return Plan(frozenset(range(len(sizes))), 0)
    largest = max(sizes, default=0)
    window = max(PIECES_IN_WINDOW * piece_bytes(max_weight_bytes), 2 * largest)
    if window > room:
        least = max(fixed_bytes + 2 * largest, -(-4 * fixed_bytes // 3))
        raise ConfigError(
            f"max_weight_bytes={max_weight_bytes}: expected about {least} or more. "
            f"{fixed_bytes} bytes of this model stay in memory (small tensors, and those that were "
            "changed while they were loaded: another dtype than they are stored in, GGUF, merged "
            f"experts), and a layer of {largest} bytes must fit twice"
        )
    return Plan(frozenset(_spread(sizes, room - window)), window)


def _spread(sizes: Sequence[int], room: int) -> list[int]:
    """Pieces of at most `room` bytes in all, at even distances."""
    share, due, chosen = room / sum(sizes), 0.0, []
    for index, size in enumerate(sizes):
        due += share * size
        if due >= size and size <= room:
            chosen.append(index)
            due -= size
            room -= size
    return chosen
