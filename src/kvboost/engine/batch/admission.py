"""Admission: which waiting request joins the batch next.

A tenant's share is its part of the running requests or of the pool's tokens, whichever is larger.
The tenant with the smallest share is next. A request that fits may pass one that does not, a
limited number of times; then it is waited for, unless its tenant has its fair share already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvboost.build import Parts
from kvboost.engine.batch.member import Member
from kvboost.engine.batch.queue import FairQueue

MOST_PASSED = 16  # requests that may pass one that does not fit
MOST_PREFILLS = 4  # of a tenant at once if they do not fit in a step


class Admission:
    """Decides over the requests that wait and run. Not thread-safe."""

    def __init__(self, parts: Parts, running: Sequence[Member]) -> None:
        self.waiting = FairQueue()
        self._parts, self._running = parts, running

    @property
    def most_running(self) -> int:
        """A request that rotates its keys unlike others has the batch for itself."""
        if self._running and self.is_alone(self._running[0]):
            return 1
        return self._parts.options.max_batch_size if self._parts.piece_tokens is None else 1

    def is_alone(self, member: Member) -> bool:
        """Whether a request cannot run beside others."""
        return self._parts.model.is_alone(member.num_tokens)

    def next(self, is_ready: Callable[[Member], bool], *, is_full: bool) -> Member | None:
        """The request that joins now; stays in line.

        `is_full`: the prompts in the batch fill the next step. Then a tenant may have a few
        prefills at once, so that a short prompt does not wait for a long one.
        """
        passed: list[Member] = []
        held: set[str] = set()  # tenants whose first request is waited for
        if is_full:
            prefills = [each.request.tenant for each in self._running if each.pending]
            held = {tenant for tenant in prefills if prefills.count(tenant) >= MOST_PREFILLS}
        room = self._room()
        for member in self.waiting.in_order(self._share):
            tenant = member.request.tenant
            if tenant in held:
                continue
            if member.num_tokens <= room and not (self._running and self.is_alone(member)):
                if is_ready(member):
                    for each in passed:
                        each.num_passed += 1
                    return member
                continue
            passed.append(member)
            if member.num_passed >= MOST_PASSED:
                if self._share(tenant) < self._fair_share:
                    return None
                held.add(tenant)
        return None

    def _room(self) -> int:
        """Tokens of the longest request that could join."""
        if not self._running:
            return self._parts.working_tokens
        if len(self._running) >= self.most_running:
            return 0
        return self._parts.pool.room([(each.rows, each.num_tokens) for each in self._running])

    def _share(self, tenant: str) -> float:
        own = [each for each in self._running if each.request.tenant == tenant]
        places = len(own) / self._parts.options.max_batch_size
        tokens = sum(each.num_tokens for each in own) / self._parts.working_tokens
        return max(places, tokens)

    @property
    def _fair_share(self) -> float:
        return 1 / len(self.waiting.tenants | {each.request.tenant for each in self._running})
