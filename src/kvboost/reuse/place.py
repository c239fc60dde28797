"""plan -> K/V in its slots. Fetches, decodes, moves and copies; what cannot be had is a miss."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost.codecs.frame import Head, decode, read
from kvboost.core import Entry, FrameKey, Match, MatchKind, Namespace, ReusePlan
from kvboost.errors import CacheError
from kvboost.rope import move
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
    brought: Mapping[FrameKey, memoryview] | None = None,
) -> Placed:
    """Fill `slots` with what the plan reuses and return what came true of it.

    Frames come from memory and from `brought`; without it, tiers of our own are asked and waited
    for.

    Keys tell namespaces apart already; a frame of another one than `space` is refused all the same.

    An exact match holds only on top of all matches before it, so the first one that is gone or
    broken ends the exact ones. Moved ones stand each for itself.
    """
    keys = list(dict.fromkeys(match.key for match in plan.matches))
    if brought is None:
        loaded = store.tiers.get(keys)
    else:
        loaded = {**brought, **store.tiers.memory.get(keys)}
    placed: list[Match] = []
    lost: list[FrameKey] = []
    sensitivities = np.zeros(plan.num_tokens, np.float32)
    for match in plan.matches:
        if match.kind is MatchKind.EXACT and lost:
            continue
        frame = loaded.get(match.key)
        head = None if frame is None else _place(match, frame, slots, store, space)
        if head is None:
            lost.append(match.key)
            continue
        placed.append(_as_stored(match, head.entry, placed[-1] if placed else None))
        if head.sensitivity:
            part = np.frombuffer(head.sensitivity, np.uint8)[match.offset :][: len(match.span)]
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
    match: Match, source: memoryview, slots: Slots, store: ChunkStore, space: Namespace
) -> Head | None:
    """Write a match's rows; the head of their frame, or None if that is no good."""
    try:
        head = read(source)
        whole = decode(source, head, store.codec)
    except CacheError as error:
        log.warning("a stored frame cannot be used: %s", error)
        store.metrics.add("damaged_frames")
        store.tiers.discard(match.key)
        return None
    if head.entry.space != space:
        log.error("a stored frame belongs to another tenant, adapter or model")
        store.metrics.add("foreign_frames")
        store.tiers.discard(match.key)
        return None
    kv = [part[:, :, match.offset : match.offset + len(match.span)] for part in whole]
    slots.write(match.span, kv)
    return head


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
