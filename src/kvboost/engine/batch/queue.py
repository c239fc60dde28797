"""Waiting requests: tenants take turns, each in the order of its calls; and places for them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvboost.engine.batch.member import Member


class FairQueue:
    """Requests that wait. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Member]] = {}
        self._served: Counter[str] = Counter()  # tokens, of tenants that wait

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Member]:
        """All, each tenant's in order."""
        for members in self._waiting.values():
            yield from members

    @property
    def tenants(self) -> set[str]:
        """Those with waiting requests."""
        return set(self._waiting)

    def in_order(self, share: Callable[[str], float]) -> Iterator[Member]:
        """All: tenants with the smallest share first, then those served least, then the newest."""
        newest_first = list(reversed(self._waiting))
        for tenant in sorted(newest_first, key=lambda each: (share(each), self._served[each])):
            yield from list(self._waiting[tenant])

    def add(self, member: Member) -> None:
        """Let a request wait behind those of its tenant."""
        self._line(member).append(member)

    def put_back(self, member: Member) -> None:
        """Let a preempted request wait before those of its tenant."""
        self._line(member).appendleft(member)

    def take(self, member: Member) -> None:
        """Let a request go, and count once what its tenant is served by that."""
        if not member.joined_at:
            self._served[member.request.tenant] += member.num_tokens
        self.remove(member)

    def remove(self, member: Member) -> None:
        """Let a request go."""
        tenant = member.request.tenant
        self._waiting[tenant].remove(member)
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._served[tenant]

    def _line(self, member: Member) -> deque[Member]:
        tenant = member.request.tenant
        if tenant not in self._waiting:
            # Who comes now has no claim for the time when it did not want anything.
            self._served[tenant] = min((self._served[t] for t in self._waiting), default=0)
            self._waiting[tenant] = deque()
        return self._waiting[tenant]


class Places:
    """Places in the batch and its queue, counted by tenant. Thread-safe.

    When all are taken, a tenant with less than its fair share of them may use `num_extra` more.
    """

    def __init__(self, num_places: int, num_extra: int) -> None:
        self._num_places, self._num_extra = num_places, num_extra
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    def acquire(self, tenant: str, *, waits: bool) -> bool:
        """Take a place if there is one for this tenant; `waits` until there is."""
        with self._changed:
            while not self._is_free_for(tenant):
                if not waits:
                    return False
                self._changed.wait()
            self._taken[tenant] += 1
            return True

    def release(self, tenant: str) -> None:
        """Give a place back."""
        with self._changed:
            self._taken[tenant] -= 1
            if self._taken[tenant] == 0:
                del self._taken[tenant]
            self._changed.notify_all()

    def _is_free_for(self, tenant: str) -> bool:
        num_taken = self._taken.total()
        if num_taken < self._num_places:
            return True
        fair_share = self._num_places / len({*self._taken, tenant})
        is_below = self._taken[tenant] < fair_share
        return is_below and num_taken < self._num_places + self._num_extra
