"""plan -> K/V in its slots. Fetches, decodes and copies; what cannot be fetched becomes a miss."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvboost.codecs.base import Codec
from kvboost.core import Match, ReusePlan
from kvboost.errors import CacheError
from kvboost.metrics import Metrics
from kvboost.tiers.base import Tier

if TYPE_CHECKING:
    from kvboost.models.base import Slots

log = logging.getLogger(__name__)


def assemble(
    plan: ReusePlan, slots: Slots, tier: Tier, codec: Codec, metrics: Metrics
) -> ReusePlan:
    """Fill `slots` with what the plan reuses and return the plan as it came true.

    An exact match holds only on top of all matches before it, so the first one that is gone or
    broken ends the reuse.
    """
    fetched: dict[int, memoryview] = {}
    for count, match in reversed(list(enumerate(plan.matches))):
        # Last first, so that the beginning of the prompt counts as used most recently.
        frame = _fetch(match, tier, metrics)
        if frame is not None:
            fetched[count] = frame
    for count, match in enumerate(plan.matches):
        if count not in fetched or not _place(match, fetched[count], slots, codec, metrics):
            return ReusePlan(plan.num_tokens, plan.matches[:count])
    return plan


def _fetch(match: Match, tier: Tier, metrics: Metrics) -> memoryview | None:
    try:
        return tier.get(match.key)
    except CacheError as error:
        _fault(error, metrics)
        return None


def _place(match: Match, frame: memoryview, slots: Slots, codec: Codec, metrics: Metrics) -> bool:
    try:
        slots.write(match.span, codec.decode(frame, match.num_tokens))
    except CacheError as error:
        _fault(error, metrics)
        return False
    return True


def _fault(error: CacheError, metrics: Metrics) -> None:
    log.warning("cache fault while loading, computing instead: %s", error)
    metrics.add("cache_faults")
