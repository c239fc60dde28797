"""Who leaves first. Knows keys and sizes; no bytes, no I/O, no locks, no clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvboost.core import FrameKey

_Cell: TypeAlias = "OrderedDict[FrameKey, None]"


class Eviction(ABC):
    """An order of the keys of one tier, kept up to date by the tier.

    What is used or added by one call belongs to one prompt, its last chunk first: a chunk is of
    no use without the ones before it, so it leaves before them.
    """

    @abstractmethod
    def add(self, sizes_bytes: Mapping[FrameKey, int]) -> None:
        """Keys came in.

        The tier adds first and evicts then: a new key may be the first to leave.
        """

    @abstractmethod
    def use(self, keys: Iterable[FrameKey]) -> None:
        """Keys that are here were read."""

    @abstractmethod
    def remove(self, key: FrameKey) -> None:
        """A key went out, for whatever reason."""

    @abstractmethod
    def victims(self) -> Iterator[FrameKey]:
        """All keys, the first to leave first. Nothing may change while this is read."""


class ReuseDensity(Eviction):
    """Keeps what saves most for the room and time that it takes, as learned from what came back.

    A use saves computing and storage costs bytes, both by the token, so the value of a key is
    (chance of a use / time until then), the time chosen to make that largest. The chance comes
    from counting, for keys used once, twice, ... and for ages on a logarithmic scale, how many
    came to this age and how many were used at it. Keys that left are counted too, for some time;
    otherwise a small tier could not learn what it misses.

    Keys of one class and age share a cell in which the oldest leaves first. Only the cells are
    ranked, and only now and then, so that all calls take constant time on average. Time is the
    number of bytes added and used.
    """

    AGES = tuple(2 ** (step / 2) for step in range(-4, 9))  # where cells end; in budgets of bytes
    TICKS_PER_BUDGET = 32
    # Before anything is counted: chances of a use within one cell, for keys that were used once,
    # twice, ... (about those of a trace of conversations), with the weight of that many keys.
    PRIOR_CHANCES = (0.025, 0.045, 0.055, 0.09)
    PRIOR_WEIGHT = 20

    def __init__(self, budget_bytes: int) -> None:
        self._age_ends = [budget_bytes * age for age in self.AGES]
        self._tick_bytes = budget_bytes / self.TICKS_PER_BUDGET
        self._now = 0
        self._next_tick = 0.0
        self._known: dict[FrameKey, _Known] = {}
        self._here, self._gone = self._no_cells(), self._no_cells()  # by class, then by age
        self._counts = [_Counts(chance, len(self.AGES)) for chance in self.PRIOR_CHANCES]
        self._ranking: list[_Cell] | None = None

    def add(self, sizes_bytes: Mapping[FrameKey, int]) -> None:
        """A key that comes back goes on counting its uses."""
        for key, size_bytes in sizes_bytes.items():
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Known(size_bytes)
            else:
                self._count_use(key, known)
                known.size_bytes = size_bytes
            self._renew(key, known)
        self._pass_time(sum(sizes_bytes.values()))

    def use(self, keys: Iterable[FrameKey]) -> None:
        """Start a new age, as a key that was used once more."""
        used_bytes = 0
        for key in keys:
            known = self._known[key]
            self._count_use(key, known)
            self._renew(key, known)
            used_bytes += known.size_bytes
        self._pass_time(used_bytes)

    def remove(self, key: FrameKey) -> None:
        """Remember the key for as long as it is counted."""
        known = self._known[key]
        del self._cells_of(known)[known.age][key]
        if known.age == len(self.AGES):
            del self._known[key]
            return
        known.is_here = False
        self._cells_of(known)[known.age][key] = None

    def victims(self) -> Iterator[FrameKey]:
        """Cell by cell, the one of least value first."""
        if self._ranking is None:
            self._ranking = self._rank()
        for cell in self._ranking:
            yield from cell

    def _no_cells(self) -> list[list[_Cell]]:
        return [[OrderedDict() for _ in range(len(self.AGES) + 1)] for _ in self.PRIOR_CHANCES]

    def _cells_of(self, known: _Known) -> list[_Cell]:
        return (self._here if known.is_here else self._gone)[known.use_class]

    def _count_use(self, key: FrameKey, known: _Known) -> None:
        if known.age < len(self.AGES):
            self._counts[known.use_class].used[known.age] += 1
        del self._cells_of(known)[known.age][key]
        known.use_class = min(known.use_class + 1, len(self._counts) - 1)

    def _renew(self, key: FrameKey, known: _Known) -> None:
        known.is_here, known.age, known.touched_at = True, 0, self._now
        self._cells_of(known)[0][key] = None
        self._counts[known.use_class].came[0] += 1

    def _pass_time(self, touched_bytes: int) -> None:
        self._now += touched_bytes
        if self._now < self._next_tick:
            return
        self._next_tick = self._now + self._tick_bytes
        self._ranking = None
        for cells in (self._here, self._gone):
            for rows in cells:
                # From the youngest on: after a large step a key may move through several cells.
                for age in range(len(self.AGES)):
                    self._move_old(rows, age)

    def _move_old(self, rows: list[_Cell], age: int) -> None:
        """Move what has outgrown its cell to the next; forget keys that left long ago."""
        limit = self._now - self._age_ends[age]
        is_last = age + 1 == len(self.AGES)
        while rows[age]:
            key = next(iter(rows[age]))
            known = self._known[key]
            if known.touched_at > limit:
                return
            del rows[age][key]
            if is_last and not known.is_here:
                del self._known[key]
                continue
            known.age = age + 1
            rows[age + 1][key] = None
            if not is_last:
                self._counts[known.use_class].came[age + 1] += 1

    def _rank(self) -> list[_Cell]:
        """Cells by value; of equal ones the less used, then the older first."""
        densities: list[list[float]] = []
        for counts in self._counts:
            own = _densities(counts.chances(self.PRIOR_WEIGHT), self._age_ends)
            # A use of a chunk is one of all chunks before it, which are of a higher class.
            # They must not leave first because few of them were counted.
            less_used = densities[-1] if densities else own
            densities.append([max(pair) for pair in zip(own, less_used, strict=True)])
        order = [
            (densities[use_class][age], use_class, -age)
            for use_class in range(len(self._counts))
            for age in range(len(self.AGES) + 1)
        ]
        return [self._here[use_class][-age] for _, use_class, age in sorted(order)]


@dataclass(slots=True)
class _Known:
    """What is remembered of a key, here or gone."""

    size_bytes: int
    use_class: int = 0
    is_here: bool = True
    age: int = 0
    touched_at: int = 0


@dataclass(slots=True)
class _Counts:
    """How many keys of one class came to each age, and were used at it."""

    prior_chance: float
    num_ages: int
    came: list[int] = field(init=False)
    used: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.came, self.used = [0] * self.num_ages, [0] * self.num_ages

    def chances(self, weight: float) -> list[float]:
        """Chances of a use at each age; where few were counted, near that of the age before."""
        chances, chance = [], self.prior_chance
        for came, used in zip(self.came, self.used, strict=True):
            chance = (used + weight * chance) / (came + weight)
            chances.append(chance)
        return chances


def _densities(chances: list[float], age_ends: list[float]) -> list[float]:
    """Uses per time from each age on, until the best moment to give up; nothing after the last."""
    widths = [end - start for start, end in zip([0.0, *age_ends], age_ends, strict=False)]
    densities = []
    for start in range(len(chances)):
        left, uses, time, best = 1.0, 0.0, 0.0, 0.0
        for chance, width in zip(chances[start:], widths[start:], strict=True):
            used = left * chance
            uses += used
            time += (left - used / 2) * width
            left -= used
            best = max(best, uses / time)
        densities.append(best)
    return [*densities, 0.0]
