"""plan -> K/V in its slots. Fetches, decodes, moves and copies; what cannot be had is a miss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost.core import FrameKey, Match, MatchKind, ReusePlan
from kvboost.errors import CacheError
from kvboost.rope import move
from kvboost.tiers.store import ChunkStore

if TYPE_CHECKING:
    from kvboost.models.base import CausalModel, Slots


@dataclass(frozen=True)
class Placed:
    """What of a plan is in its slots now, and the keys under which nothing usable was found."""

    plan: ReusePlan
    lost: tuple[FrameKey, ...]
    sensitivities: npt.NDArray[np.float32]  # of each position; 0 where nothing is known


def assemble(plan: ReusePlan, slots: Slots, model: CausalModel, store: ChunkStore) -> Placed:
    """Fill `slots` with what the plan reuses and return what came true of it.

    An exact match holds only on top of all matches before it, so the first one that is gone or
    broken ends the exact ones. Moved ones stand each for itself.
    """
    frames: dict[FrameKey, memoryview | None] = {}
    for match in reversed(plan.matches):
        # Last first, so that the beginning of the prompt counts as used most recently.
        if match.key not in frames:
            frames[match.key] = _fetch(match, store)
    placed: list[Match] = []
    lost: list[FrameKey] = []
    sensitivities = np.zeros(plan.num_tokens, np.float32)
    for match in plan.matches:
        if match.kind is MatchKind.EXACT and lost:
            continue
        frame = frames[match.key]
        if frame is not None and _place(match, frame, slots, store):
            placed.append(match)
            known = store.codec.sensitivity(frame, match.num_tokens)
            if known:
                part = np.frombuffer(known, np.uint8)[match.offset :][: len(match.span)]
                sensitivities[match.span.start : match.span.stop] = part
        else:
            lost.append(match.key)
    came_true = ReusePlan(plan.num_tokens, tuple(placed))
    for run in came_true.runs:
        if run.kind is MatchKind.MOVED:
            slots.exact_stop = min(slots.exact_stop, run.span.start)
            move(slots.read(run.span), model.geometry, model.rotations, run.delta)
    return Placed(came_true, tuple(lost), sensitivities)


def _fetch(match: Match, store: ChunkStore) -> memoryview | None:
    try:
        return store.tier.get(match.key)
    except CacheError as error:
        store.note_fault(error)
        return None


def _place(match: Match, frame: memoryview, slots: Slots, store: ChunkStore) -> bool:
    try:
        whole = store.codec.decode(frame, match.num_tokens)
    except CacheError as error:
        store.note_fault(error)
        return False
    kv = [part[:, :, match.offset : match.offset + len(match.span)] for part in whole]
    slots.write(match.span, kv)
    return True
