"""Promotion: contexts that reused moved text are prefilled exactly in idle time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvboost.build import Parts
from kvboost.core import FrameKey, MatchKind, Namespace
from kvboost.engine.audit import STEP_TOKENS, carry_out, num_at_hand, prepare_audit
from kvboost.engine.batch.member import Member
from kvboost.engine.prefill import approximate_chunks, space_of
from kvboost.engine.warm import warm_up
from kvboost.engine.worker import Idle
from kvboost.models.packed import LEAST_SHARED
from kvboost.models.pooled import PooledChunks

MOST_WAITING = 4  # contexts: of more, the oldest is forgotten


@dataclass(frozen=True)
class Promotion:
    """A context that was answered on moved K/V."""

    tokens: list[int]
    parts: Parts
    tenant: str
    space: Namespace
    num_deletions: int
    num_exact: int  # first tokens that are stored as exact already
    sources: Sequence[FrameKey]  # what was moved, and what was computed on top of that

    @property
    def is_wanted(self) -> bool:
        """Whether nothing of it was deleted or evicted since."""
        store = self.parts.store
        is_there = all(store.index.get(key) is not None for key in self.sources)
        is_same = self.space == space_of(self.tenant, self.parts)
        return is_there and is_same and self.num_deletions == store.num_deletions[self.tenant]


class FollowUps:
    """Idle work after answers on moved text: promotions and audits. On the engine's thread.

    The next question on the same context is then exact, and cheaper than on moved text.
    """

    def __init__(self, add_idle: Callable[[Idle], None]) -> None:
        self._add_idle = add_idle
        self._waiting: deque[Promotion] = deque(maxlen=MOST_WAITING)
        self._is_running = False

    def add(self, member: Member) -> None:
        """Take note of an answer, while its rows are there and before they are stored."""
        request, parts, prefilled = member.request, member.parts, member.prefilled
        assert prefilled is not None
        if prefilled.rows.exact_stop >= len(request.tokens):
            return
        promotion = _promotion_of(member) if _can_promote(parts) else None
        audit = prepare_audit(request, parts, prefilled, member.terms, member.output)
        if audit is not None:
            first = None if promotion is None else promote(promotion, is_wanted=True)
            self._add_idle(carry_out(audit, parts, first))
        elif promotion is not None:
            self._waiting.append(promotion)
            self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._is_running:
            self._is_running = True
            self._add_idle(self._promote_next())

    def _promote_next(self) -> Iterator[None]:
        """One at a time: audits that wait meanwhile have their turn."""
        try:
            yield from promote(self._waiting.pop())  # the newest is the most likely to come back
        finally:
            self._is_running = False
            self._go_on()


def _can_promote(parts: Parts) -> bool:
    """Whether K/V stays in the pool, so that a step continues a stored prefix without a copy."""
    is_pooled = isinstance(parts.store.tiers.medium, PooledChunks)
    return parts.options.promote and is_pooled and parts.model.joins


def _promotion_of(member: Member) -> Promotion:
    request, parts, prefilled = member.request, member.parts, member.prefilled
    assert prefilled is not None
    tokens = [*request.tokens, *member.output][: member.num_computed]
    moved = [match.key for match in prefilled.plan.matches if match.kind is MatchKind.MOVED]
    approximate = [key for _, keys in approximate_chunks(prefilled, tokens, parts) for key in keys]
    return Promotion(
        tokens=tokens,
        parts=parts,
        tenant=request.tenant,
        space=prefilled.space,
        num_deletions=prefilled.num_deletions,
        num_exact=num_at_hand(tokens, parts, request.tenant),
        sources=[*moved, *approximate],
    )


def promote(promotion: Promotion, *, is_wanted: bool = False) -> Iterator[None]:
    """Prefill a context exactly. Each step computes and stores some tokens, and keeps no rows.

    It ends when something was deleted or evicted meanwhile, could not be stored, or has no room.
    With `is_wanted`, what is stored replaces chunks that are used more.
    """
    tokens, parts, tenant = promotion.tokens, promotion.parts, promotion.tenant
    least = promotion.num_exact
    while (num_exact := num_at_hand(tokens, parts, tenant)) < len(tokens) - 1:
        if num_exact < least or not promotion.is_wanted:
            return
        stop = min(len(tokens), num_exact + STEP_TOKENS)
        if parts.pool.room([]) < stop - (num_exact if num_exact >= LEAST_SHARED else 0):
            return
        warm_up(tokens[:stop], parts, before=[], tenant=tenant, is_wanted=is_wanted)
        parts.metrics.add("promoted_tokens", stop - num_exact, tenant=tenant)
        least = min(stop, len(tokens) - 1)
        yield
