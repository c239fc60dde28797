"""plan -> K/V in its slots. Decodes, moves and copies; what cannot be had is a miss."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost.core import Entry, FrameKey, Match, MatchKind, Namespace, ReusePlan
from kvboost.rope import move
from kvboost.tiers.base import StoredChunk
from kvboost.tiers.store import ChunkStore

if TYPE_CHECKING:
    from kvboost.models.base import CausalModel, Slots

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placed:
    """What of a plan is in its slots now, and the keys under which nothing usable was found."""

    plan: ReusePlan
    lost: tuple[FrameKey, ...]
    sensitivities: npt.NDArray[np.float32]  # of each position; 0 where nothing is known


def assemble(
    plan: ReusePlan,
    slots: Slots,
    model: CausalModel,
    store: ChunkStore,
    space: Namespace,
    chunks: Mapping[FrameKey, StoredChunk],
) -> Placed:
    """Fill `slots` with what the plan reuses of `chunks`, and return what came true of it.

    Keys tell namespaces apart already; a chunk of another one than `space` is refused all the same.

    An exact match holds only on top of all matches before it, so the first one that is gone or
    broken ends the exact ones. Moved ones stand each for itself.
    """
    placed: list[Match] = []
    lost: list[FrameKey] = []
    sensitivities = np.zeros(plan.num_tokens, np.float32)
    for match in plan.matches:
        if match.kind is MatchKind.EXACT and lost:
            continue
        chunk = chunks.get(match.key)
        if chunk is None or not _place(match, chunk, slots, store, space):
            lost.append(match.key)
            continue
        placed.append(_as_stored(match, chunk.entry, placed[-1] if placed else None))
        if chunk.sensitivity:
            part = np.frombuffer(chunk.sensitivity, np.uint8)[match.offset :][: len(match.span)]
            sensitivities[match.span.start : match.span.stop] = part
    came_true = ReusePlan(plan.num_tokens, tuple(placed))
    for run in came_true.runs:
        if run.kind is MatchKind.MOVED:
            slots.exact_stop = min(slots.exact_stop, run.span.start)
            rows = slots.read(run.span)
            move(rows, model.geometry, model.rotations, run.delta)
            slots.write(run.span, rows)  # of views nothing is copied
    return Placed(came_true, tuple(lost), sensitivities)


def _place(
    match: Match, chunk: StoredChunk, slots: Slots, store: ChunkStore, space: Namespace
) -> bool:
    """Write a match's rows; whether the chunk is good for that."""
    if chunk.entry.space != space:
        log.error("a stored chunk belongs to another tenant, adapter or model")
        store.metrics.add("foreign_frames")
        store.tiers.discard(match.key)
        return False
    kv = [part[:, :, match.offset : match.offset + len(match.span)] for part in chunk.kv()]
    slots.write(match.span, kv)
    return True


def _as_stored(match: Match, entry: Entry, before: Match | None) -> Match:
    """A moved match by what its frame says of itself.

    A content key names tokens alone: another process, or this one at another time, may have stored
    the same text from another position since lookup read the index.
    """
    if match.kind is MatchKind.EXACT:
        return match
    delta = match.span.start - match.offset - entry.home
    follows = (
        match.follows and before is not None and (before.key, before.delta) == (entry.parent, delta)
    )
    return replace(match, delta=delta, follows=follows, provenance=entry.provenance)
