"""Admission and preemption: which requests run.

A tenant's share is its part of the running requests or of the pool's tokens, whichever is larger.
The tenant with the smallest share is next. If its request does not fit, it preempts requests of
tenants with larger shares. Otherwise requests that fit may overtake it, a limited number of times;
then it blocks the queue, unless its tenant has its fair share already. When outputs outgrow the
pool, the youngest request of the tenant with the largest share is preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from kvboost.build import Parts
from kvboost.engine.batch.member import Member
from kvboost.engine.batch.queue import FairQueue

MOST_PASSED = 16  # requests that may overtake one that does not fit
MOST_PREFILLS = 4  # of a tenant at once if they do not fit in a step


class Admission:
    """Decides which of the waiting requests join, and which running ones leave. Not thread-safe."""

    def __init__(self, parts: Parts, running: Sequence[Member]) -> None:
        self.waiting = FairQueue()
        self._parts, self._running = parts, running

    @property
    def most_running(self) -> int:
        """The most requests at a time; 1 for a request that rotates its keys unlike others."""
        if self._running and self.is_alone(self._running[0]):
            return 1
        return self._parts.options.max_batch_size if self._parts.piece_tokens is None else 1

    def is_alone(self, member: Member) -> bool:
        """Whether a request cannot run beside others."""
        return self._parts.model.is_alone(member.num_tokens)

    def next(
        self, is_ready: Callable[[Member], bool], *, is_full: bool
    ) -> tuple[Member, list[Member]] | None:
        """The request to admit now and those that it preempts; neither is moved here.

        `is_full`: the prompts in the batch fill the next step. Then a tenant may have a few
        prefills at once, so that a short prompt does not wait for a long one.
        """
        if not len(self.waiting):
            return None
        passed: list[Member] = []
        tried: set[str] = set()  # tenants that have no claim to preempt others
        held = self._prefilling() if is_full else set()  # tenants whose next request waits
        room = self._room(self._running)
        for member in self.waiting.in_order(partial(self._share, self._running)):
            tenant = member.request.tenant
            if tenant in held:
                continue
            preempted: list[Member] | None = []
            if not self._fits(member, self._running, room):
                preempted = None if tenant in tried else self._preempted_for(member)
            if preempted is None:
                passed.append(member)
                tried.add(tenant)
                is_waited_for = member.num_passed >= MOST_PASSED
                if is_waited_for and self._share(self._running, tenant) < self._fair_share:
                    return None
                if is_waited_for or member.joined_at:  # it was preempted
                    held.add(tenant)
            elif is_ready(member):
                for each in passed:
                    each.num_passed += 1
                return member, preempted
        return None

    def _prefilling(self) -> set[str]:
        """Tenants with as many prefills as they may have in a full step."""
        tenants = Counter(each.request.tenant for each in self._running if each.is_prefilling)
        return {tenant for tenant, count in tenants.items() if count >= MOST_PREFILLS}

    def overflow(self) -> Member | None:
        """The request to preempt because outputs have outgrown the pool, if they have."""
        has_grown = any(each.has_grown for each in self._running)
        if not has_grown or self._room(self._running) >= 0:
            return None
        victim = self._victim(self._running)
        if victim is None:
            return None
        # A request alone has room, unless rows that it shared take more blocks than its own.
        return victim if len(self._running) > 1 or victim.rows.num_shared else None

    def _preempted_for(self, member: Member) -> list[Member] | None:
        """The requests to preempt so that `member` fits; None if its tenant has no claim to that.

        It has a claim if no preempted tenant is left with a smaller share than its own.
        """
        rest, preempted = list(self._running), []
        while not self._fits(member, rest, self._room(rest)):
            victim = self._victim(rest)
            if victim is None:
                return None
            rest.remove(victim)
            kept = self._share(rest, victim.request.tenant)
            if kept < self._share([*rest, member], member.request.tenant):
                return None
            preempted.append(victim)
        return preempted

    def _victim(self, running: Sequence[Member]) -> Member | None:
        """The youngest request of the tenant with the largest share.

        Not a guest, and not one with private rows, which would free nothing in the pool.
        """
        return max(
            (each for each in running if each.guest is None and not each.rows.is_private),
            key=lambda each: (self._share(running, each.request.tenant), each.joined_at),
            default=None,
        )

    def _fits(self, member: Member, running: Sequence[Member], room: int) -> bool:
        if not running:
            return True
        is_free = len(running) < self.most_running and not self.is_alone(member)
        return is_free and member.num_reserved <= room

    def _room(self, running: Sequence[Member]) -> int:
        """Tokens of the longest request that fits beside others."""
        reserved = [(each.rows, each.num_reserved) for each in running]
        leaving = [each.rows for each in self._running if each not in running]
        return self._parts.pool.room(reserved, leaving)

    def _share(self, running: Sequence[Member], tenant: str) -> float:
        own = [each for each in running if each.request.tenant == tenant]
        places = len(own) / self._parts.options.max_batch_size
        tokens = sum(each.num_reserved for each in own) / self._parts.working_tokens
        return max(places, tokens)

    @property
    def _fair_share(self) -> float:
        return 1 / len(self.waiting.tenants | {each.request.tenant for each in self._running})
