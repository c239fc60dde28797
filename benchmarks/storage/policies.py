"""Known eviction policies as they were published, for blocks of one size."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence

Queue = OrderedDict[int, None]


class Cache(ABC):
    """Holds blocks; `request` puts or uses all blocks of a prompt."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    def request(self, blocks: Sequence[int]) -> None:
        """Last block first, which is better for each of these policies than first block first."""
        for block in reversed(blocks):
            self.access(block)

    def access(self, block: int) -> None:
        raise NotImplementedError


class ARC(Cache):
    """Megiddo and Modha, FAST 2003: names as there."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._p = 0.0
        self._t1, self._t2, self._b1, self._b2 = (OrderedDict[int, None]() for _ in range(4))

    def __contains__(self, block: int) -> bool:
        return block in self._t1 or block in self._t2

    def access(self, block: int) -> None:
        if block in self:
            self._t1.pop(block, None)
            self._t2.pop(block, None)
        elif block in self._b1:
            self._p = min(self.num_blocks, self._p + max(len(self._b2) / len(self._b1), 1))
            self._replace(is_in_b2=False)
            del self._b1[block]
        elif block in self._b2:
            self._p = max(0, self._p - max(len(self._b1) / len(self._b2), 1))
            self._replace(is_in_b2=True)
            del self._b2[block]
        else:
            self._make_room()
            self._t1[block] = None
            return
        self._t2[block] = None

    def _make_room(self) -> None:
        recent = len(self._t1) + len(self._b1)
        total = recent + len(self._t2) + len(self._b2)
        if recent == self.num_blocks:
            if not self._b1:
                self._t1.popitem(last=False)
                return
            self._b1.popitem(last=False)
            self._replace(is_in_b2=False)
        elif total >= self.num_blocks:
            if total == 2 * self.num_blocks:
                self._b2.popitem(last=False)
            self._replace(is_in_b2=False)

    def _replace(self, *, is_in_b2: bool) -> None:
        size = len(self._t1)
        if size and (size > self._p or (is_in_b2 and size == self._p)):
            self._b1[self._t1.popitem(last=False)[0]] = None
        else:
            self._b2[self._t2.popitem(last=False)[0]] = None


class TwoQ(Cache):
    """Johnson and Shasha, VLDB 1994: a quarter for new blocks, half as many remembered."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._new, self._gone, self._main = (OrderedDict[int, None]() for _ in range(3))

    def __contains__(self, block: int) -> bool:
        return block in self._new or block in self._main

    def access(self, block: int) -> None:
        if block in self._main:
            self._main.move_to_end(block)
        if block in self:
            return
        if len(self._new) + len(self._main) == self.num_blocks:
            if len(self._new) > self.num_blocks // 4 or not self._main:
                self._gone[self._new.popitem(last=False)[0]] = None
                if len(self._gone) > self.num_blocks // 2:
                    self._gone.popitem(last=False)
            else:
                self._main.popitem(last=False)
        queue = self._main if block in self._gone else self._new
        self._gone.pop(block, None)
        queue[block] = None


class S3FIFO(Cache):
    """Yang and others, SOSP 2023: a tenth for new blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._gone: Queue = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def access(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(3, self._uses[block] + 1)
            return
        while len(self._uses) == self.num_blocks:
            self._evict()
        (self._main if block in self._gone else self._small).append(block)
        self._gone.pop(block, None)
        self._uses[block] = 0

    def _evict(self) -> None:
        num_small = max(1, self.num_blocks // 10)
        if len(self._small) < num_small and self._main:
            block = self._main.popleft()
            if self._uses[block]:
                self._uses[block] -= 1
                self._main.append(block)
            else:
                del self._uses[block]
            return
        block = self._small.popleft()
        if self._uses[block] > 1:
            self._uses[block] = 0
            self._main.append(block)
            return
        del self._uses[block]
        self._gone[block] = None
        if len(self._gone) > self.num_blocks - num_small:
            self._gone.popitem(last=False)


class SIEVE(Cache):
    """Zhang and others, NSDI 2024. The hand is the front of a queue in two parts."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._is_used: dict[int, bool] = {}
        self._ahead: deque[int] = deque()  # from the hand to the newest
        self._behind: deque[int] = deque()  # older than the hand, and kept

    def __contains__(self, block: int) -> bool:
        return block in self._is_used

    def access(self, block: int) -> None:
        if block in self._is_used:
            self._is_used[block] = True
            return
        while len(self._is_used) == self.num_blocks:
            candidate = self._ahead.popleft()
            if self._is_used[candidate]:
                self._is_used[candidate] = False
                self._behind.append(candidate)
            else:
                del self._is_used[candidate]
            if not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
        self._is_used[block] = False
        self._ahead.append(block)


class Ranked(Cache):
    """Evicts the block of the lowest rank, which changes only by an access of that block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._ranks: dict[int, tuple[float, float]] = {}
        self._heap: list[tuple[tuple[float, float], int]] = []
        self._now = 0

    def __contains__(self, block: int) -> bool:
        return block in self._ranks

    def access(self, block: int) -> None:
        self._now += 1
        if block not in self and len(self._ranks) == self.num_blocks:
            self._evict()
        self._set(block, (self._worth(block), self._now))

    def _worth(self, block: int) -> float:
        """What a block that is used now is ranked by; of equal ones, the latest use is last."""
        return 0.0

    def _set(self, block: int, rank: tuple[float, float]) -> None:
        self._ranks[block] = rank
        heapq.heappush(self._heap, (rank, block))

    def _evict(self) -> float:
        while True:
            rank, block = heapq.heappop(self._heap)
            if self._ranks.get(block) == rank:
                del self._ranks[block]
                return rank[0]


class LRU(Ranked):
    """By the last use, as blocks without a worth are."""


class LRU2(Ranked):
    """O'Neil and others, SIGMOD 1993: by the last use but one. Remembers all blocks for ever."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._last: dict[int, int] = {}

    def _worth(self, block: int) -> float:
        before = self._last.get(block, 0)
        self._last[block] = self._now
        return before


class LFU(Ranked):
    """By number of uses while here, then by age."""

    def _worth(self, block: int) -> float:
        return self._ranks[block][0] + 1 if block in self else 1


class GDSF(Ranked):
    """Cherkasova, 1998: uses while here, above the rank of the last victim."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses: dict[int, int] = {}
        self._floor = 0.0

    def _worth(self, block: int) -> float:
        self._uses[block] = self._uses[block] + 1 if block in self else 1
        return self._floor + self._uses[block]

    def _evict(self) -> float:
        self._floor = super()._evict()
        return self._floor


class Clairvoyant(Ranked):
    """Belady with bypass: the latest next use leaves first, of one prompt the last block.

    No policy has more block hits, and none has more prefix hits than block hits. A block's parent
    is used whenever the block is, so here it never leaves before the block: both rates are equal,
    and this is the bound of both.
    """

    def __init__(self, num_blocks: int, requests: Sequence[Sequence[int]]) -> None:
        super().__init__(num_blocks)
        self._number = 0
        self._next_uses: list[list[float]] = []
        following: dict[int, int] = {}
        for number in reversed(range(len(requests))):
            self._next_uses.append([following.get(b, math.inf) for b in requests[number]])
            following.update(dict.fromkeys(requests[number], number))
        self._next_uses.reverse()

    def request(self, blocks: Sequence[int]) -> None:
        for depth, block in enumerate(blocks):
            self._set(block, (-self._next_uses[self._number][depth], -depth))
        self._number += 1
        while len(self._ranks) > self.num_blocks:
            self._evict()
