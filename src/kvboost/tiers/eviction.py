"""Eviction order. Knows keys, sizes and owners; no bytes, no I/O, no locks, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvboost.core import FrameKey, Owner

_Cell: TypeAlias = "OrderedDict[FrameKey, None]"
_Cells: TypeAlias = dict[tuple[int, int], _Cell]  # by class, then by age

MOVES_PER_KEY = 32  # between cells, for each key that is added or used; a key needs about 14


class ReuseDensity:
    """Keeps the chunks that save most for their bytes and time, as learned from earlier uses.

    A use saves computing and storage costs bytes, both by the token, so the value of a key is
    (chance of a use / time until then), the time chosen to make that largest. The chance comes
    from counting, for keys used once, twice, ... and for ages on a logarithmic scale, how many
    came to this age and how many were used at it. Evicted keys are counted too, for some time;
    otherwise a small tier could not learn what it misses.

    Keys of one class and age share a cell, in which the oldest is evicted first. Only cells are
    ranked, and each call moves a bounded number of keys between cells, so every call takes
    constant time for each key it names. Time is the number of bytes added and used.

    What is added or used by one call belongs to one prompt, its last chunk first: a chunk is of
    no use without the ones before it, so it is evicted before them.
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
        self._is_due = False  # keys may have outgrown their cells since the last round
        self._ageing: Iterator[FrameKey] = iter(())
        self._known: dict[FrameKey, _Known] = {}
        places = [(c, a) for c in range(len(self.PRIOR_CHANCES)) for a in range(len(self.AGES) + 1)]
        self._here: _Cells = {place: OrderedDict() for place in places}
        self._gone: _Cells = {place: OrderedDict() for place in places}
        self._owned: dict[Owner, _Cells] = {}  # the same order again, for each owner
        self._counts = [_Counts(chance, len(self.AGES)) for chance in self.PRIOR_CHANCES]
        self._ranking: list[tuple[int, int]] | None = None

    def add(self, sizes_bytes: Mapping[FrameKey, int], owner: Owner | None = None) -> None:
        """Add keys; a returning one keeps its count of uses.

        The tier adds first and evicts then: a new key may be the first victim.
        """
        for key, size_bytes in sizes_bytes.items():
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Known(size_bytes)
            else:
                self._count_use(key, known)
                known.size_bytes = size_bytes
            known.owner = owner
            self._renew(key, known)
        self._pass_time(sum(sizes_bytes.values()), len(sizes_bytes))

    def use(self, keys: Iterable[FrameKey]) -> None:
        """Count a use of keys, each of which starts a new age."""
        used_bytes = num_keys = 0
        for key in keys:
            known = self._known[key]
            self._count_use(key, known)
            self._renew(key, known)
            used_bytes += known.size_bytes
            num_keys += 1
        self._pass_time(used_bytes, num_keys)

    def remove(self, key: FrameKey) -> None:
        """A key left. It is remembered, as in a ghost list, for as long as its uses are counted."""
        known = self._known[key]
        self._leave(key, known)
        if known.age == len(self.AGES):
            del self._known[key]
            return
        known.is_here = False
        self._enter(key, known)

    def set_aside(self, key: FrameKey) -> None:
        """Leave a key out of `victims` until it is used, removed or put back."""
        known = self._known[key]
        self._leave(key, known)
        known.is_aside = True

    def put_back(self, key: FrameKey) -> None:
        """Return a key that was set aside to the victims, first in its cell."""
        known = self._known.get(key)
        if known is not None and known.is_aside:
            self._leave(key, known)
            self._enter(key, known)
            for cell in self._cells_of(known):
                cell.move_to_end(key, last=False)

    def victims(self, owner: Owner | None = None) -> Iterator[FrameKey]:
        """Keys in the order of eviction, those of one owner or all. Read it before any change."""
        if self._ranking is None:
            self._ranking = self._rank()
        cells = self._here if owner is None else self._owned.get(owner, {})
        for place in self._ranking:
            yield from cells.get(place, ())

    def _cells_of(self, known: _Known) -> list[_Cell]:
        place = known.use_class, known.age
        if not known.is_here:
            return [self._gone[place]]
        if known.owner is None:
            return [self._here[place]]
        owned = self._owned.setdefault(known.owner, {})
        return [self._here[place], owned.setdefault(place, OrderedDict())]

    def _enter(self, key: FrameKey, known: _Known) -> None:
        for cell in self._cells_of(known):
            cell[key] = None

    def _leave(self, key: FrameKey, known: _Known) -> None:
        if known.is_aside:
            known.is_aside = False
            while known.age < len(self.AGES) and self._is_outgrown(known):
                self._grow(known)
            return
        for cell in self._cells_of(known):
            del cell[key]
        if known.is_here and known.owner is not None:
            owned, place = self._owned[known.owner], (known.use_class, known.age)
            if not owned[place]:
                del owned[place]
            if not owned:
                del self._owned[known.owner]

    def _count_use(self, key: FrameKey, known: _Known) -> None:
        self._leave(key, known)
        if known.age < len(self.AGES):
            self._counts[known.use_class].used[known.age] += 1
        known.use_class = min(known.use_class + 1, len(self._counts) - 1)

    def _renew(self, key: FrameKey, known: _Known) -> None:
        known.is_here, known.age, known.touched_at = True, 0, self._now
        self._enter(key, known)
        self._counts[known.use_class].came[0] += 1

    def _pass_time(self, touched_bytes: int, num_keys: int) -> None:
        self._now += touched_bytes
        if self._now >= self._next_tick:
            self._next_tick = self._now + self._tick_bytes
            self._ranking = None
            self._is_due = True
        for _ in range(MOVES_PER_KEY * num_keys):
            if next(self._ageing, None) is None:
                if not self._is_due:
                    return
                self._is_due, self._ageing = False, self._age()

    def _age(self) -> Iterator[FrameKey]:
        """Move keys that have outgrown their cells to the next, one a step; forget the oldest."""
        for cells in (self._here, self._gone):
            # From the youngest on: after a large step a key may move through several cells.
            for (_, age), cell in cells.items():
                while age < len(self.AGES) and cell:
                    key = next(iter(cell))
                    known = self._known[key]
                    if not self._is_outgrown(known):
                        break
                    self._leave(key, known)
                    self._grow(known)
                    if known.is_here or known.age < len(self.AGES):
                        self._enter(key, known)
                    else:
                        del self._known[key]
                    yield key

    def _is_outgrown(self, known: _Known) -> bool:
        return known.touched_at <= self._now - self._age_ends[known.age]

    def _grow(self, known: _Known) -> None:
        known.age += 1
        if known.age < len(self.AGES):
            self._counts[known.use_class].came[known.age] += 1

    def _rank(self) -> list[tuple[int, int]]:
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
        return [(use_class, -age) for _, use_class, age in sorted(order)]


@dataclass(slots=True)
class _Known:
    """What is remembered of a key, here or gone."""

    size_bytes: int
    owner: Owner | None = None
    use_class: int = 0
    is_here: bool = True
    is_aside: bool = False
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
