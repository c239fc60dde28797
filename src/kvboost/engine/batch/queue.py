"""Fairness among tenants: the order of the queue, its capacity, and the time of steps."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from kvboost.engine.batch.member import Member

MOST_SKIPPED = 8  # steps that a tenant sits out in a row
NEWCOMER_STEPS = 2  # credit of a tenant that arrives
RECENT_S = 60.0  # in which a tenant is expected to come back


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
        """Append a request to those of its tenant."""
        self._line(member).append(member)

    def put_back(self, member: Member) -> None:
        """Put a preempted request before those of its tenant."""
        self._line(member).appendleft(member)

    def take(self, member: Member) -> None:
        """Remove a request that joins the batch; its tokens count as served, once."""
        if not member.joined_at:
            self._served[member.request.tenant] += member.num_tokens
        self.remove(member)

    def remove(self, member: Member) -> None:
        """Remove a request."""
        tenant = member.request.tenant
        self._waiting[tenant].remove(member)
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._served[tenant]

    def _line(self, member: Member) -> deque[Member]:
        tenant = member.request.tenant
        if tenant not in self._waiting:
            # A tenant earns no credit while it has no requests.
            self._served[tenant] = min((self._served[t] for t in self._waiting), default=0)
            self._waiting[tenant] = deque()
        return self._waiting[tenant]


class StepTime:
    """Time of steps by tenant: one that has used more than others sits steps out.

    So a tenant is slowed down by the number of tenants, whatever the others send. One that has used
    little lately starts with a credit of two steps, so that a short request is done at once.
    """

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}  # of recent tenants
        self._seen_at: dict[str, float] = {}
        self._present: set[str] = set()
        self._skipped: Counter[str] = Counter()  # steps, in a row
        self._step_s = 0.0  # time of the last step

    def in_turn(self, members: Sequence[Member]) -> Sequence[Member]:
        """The running requests that the next step may compute."""
        tenants = {each.request.tenant for each in members}
        self._note(tenants)
        most_s = min(map(self._used_s.__getitem__, tenants), default=0.0) + self._step_s / 2
        ahead = [each for each in tenants if self._used_s[each] > most_s]
        waits = {each for each in ahead if self._skipped[each] < MOST_SKIPPED}
        self._skipped = Counter({each: self._skipped[each] + 1 for each in waits})
        return [each for each in members if each.request.tenant not in waits]

    @property
    def is_shared(self) -> bool:
        """Whether several tenants had running requests before the last step."""
        return len(self._present) > 1

    @property
    def may_be_shared(self) -> bool:
        """Whether several tenants had running requests lately."""
        return len(self._seen_at) > 1

    def charge(self, seconds: float, computed: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Divide the time of a step among its tenants by the tokens that it computed for them."""
        self._step_s = seconds
        num_tokens = sum(len(tokens) for _, tokens in computed)
        for tenant, tokens in computed:
            self._used_s[tenant] += seconds * len(tokens) / num_tokens

    def _note(self, tenants: set[str]) -> None:
        now = time.monotonic()
        self._seen_at |= dict.fromkeys(tenants, now)
        self._seen_at = {each: at for each, at in self._seen_at.items() if at > now - RECENT_S}
        level_s = max((self._used_s[each] for each in self._present), default=0.0)
        start_s = level_s - NEWCOMER_STEPS * self._step_s
        used_s = {each: self._used_s.get(each, start_s) for each in self._seen_at}
        # Time used alone is no debt, and time away is no credit.
        came = {each: min(max(used_s[each], start_s), level_s) for each in tenants - self._present}
        self._used_s = used_s | came
        self._present = tenants


class Capacity:
    """How many requests the batch and its queue take, counted by tenant. Thread-safe.

    When all is taken, a tenant with less than its fair share may use `num_extra` more.
    """

    def __init__(self, num_places: int, num_extra: int) -> None:
        self._num_places, self._num_extra = num_places, num_extra
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    def acquire(self, tenant: str, *, waits: bool) -> bool:
        """Take a place if this tenant may have one; with `waits`, wait until it may."""
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
