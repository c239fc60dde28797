"""Who is next: tenants take turns by what they were served, each in the order of its calls."""

from __future__ import annotations

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
        """All, the tenants that were served least first."""
        for tenant in sorted(self._waiting, key=self._served.__getitem__):
            yield from self._waiting[tenant]

    def add(self, member: Member) -> None:
        """Let a request wait behind those of its tenant."""
        tenant = member.request.tenant
        if tenant not in self._waiting:
            # Who comes now has no claim for the time when it did not want anything.
            self._served[tenant] = min((self._served[t] for t in self._waiting), default=0)
            self._waiting[tenant] = deque()
        self._waiting[tenant].append(member)

    def first(self, is_ready: Callable[[Member], bool]) -> Member | None:
        """The first in line for whom that is true; stays in line."""
        return next((each for each in self if is_ready(each)), None)

    def take(self, member: Member) -> None:
        """Let a request go, and count what its tenant is served by that."""
        self._served[member.request.tenant] += member.num_tokens
        self.remove(member)

    def remove(self, member: Member) -> None:
        """Let a request go."""
        tenant = member.request.tenant
        self._waiting[tenant].remove(member)
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._served[tenant]
