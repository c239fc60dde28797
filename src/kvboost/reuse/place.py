"""plan -> K/V in its slots. Decodes, copies and rotates; what is missing or damaged is a miss."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvboost.codecs.frame import FrameError
from kvboost.core import (
    TOKEN_BYTES,
    Entry,
    FrameKey,
    Match,
    MatchKind,
    Namespace,
    Provenance,
    ReusePlan,
    prefix_key,
)
from kvboost.rope import move
from kvboost.tiers.base import StoredChunk
from kvboost.tiers.store import ChunkStore

if TYPE_CHECKING:
    from kvboost.models.base import ModelFacts, Slots

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placed:
    """The part of a plan that was placed, and the keys that had nothing usable."""

    plan: ReusePlan
    lost: tuple[FrameKey, ...]


def assemble(
    plan: ReusePlan,
    tokens: Sequence[int],
    slots: Slots,
    model: ModelFacts,
    store: ChunkStore,
    space: Namespace,
    chunks: Mapping[FrameKey, StoredChunk],
) -> Placed:
    """Fill `slots` with what the plan reuses of `chunks`, and return what was placed.

    Keys already depend on namespace and tokens. A chunk of another namespace than `space`, or
    with other tokens than the prompt, is refused all the same: whoever can write to a shared tier
    can write any frame under any key.

    An exact match holds only on top of all matches before it, so the first one that is gone or
    broken ends the exact ones. Moved matches do not depend on each other.
    """
    placed: list[Match] = []
    lost: list[FrameKey] = []
    for match in plan.matches:
        if match.kind is MatchKind.EXACT and lost:
            continue
        chunk = chunks.get(match.key)
        if chunk is None or not _place(match, chunk, tokens, slots, store, space):
            lost.append(match.key)
            continue
        placed.append(_as_stored(match, chunk.entry, placed[-1] if placed else None))
    placed_plan = ReusePlan(plan.num_tokens, tuple(placed))
    for run in placed_plan.runs:
        if run.kind is MatchKind.MOVED:
            slots.exact_stop = min(slots.exact_stop, run.span.start)
            geometry, rotations = model.geometry, model.rotations
            turn = partial(move, geometry=geometry, rotations=rotations, delta=run.delta)
            slots.turn(run.span, turn)
    return Placed(placed_plan, tuple(lost))


def _place(
    match: Match,
    chunk: StoredChunk,
    tokens: Sequence[int],
    slots: Slots,
    store: ChunkStore,
    space: Namespace,
) -> bool:
    """Write a match's rows; returns whether the chunk was usable."""
    if chunk.entry.space != space:
        log.error("a stored chunk belongs to another tenant, adapter or model")
        store.metrics.add("foreign_frames")
        store.tiers.discard(match.key)
        return False
    try:
        if not is_what_it_says(chunk, match, tokens):
            raise FrameError("its tokens, history, position or kind are not those of its key")
        slots.place(match.span, chunk, match.offset)
    except (MemoryError, torch.OutOfMemoryError):  # not the chunk's fault
        raise
    except Exception as error:  # bytes from a shared tier can cause anything
        log.warning("a stored chunk cannot be used: %s", error)
        store.metrics.add("damaged_frames")
        store.tiers.discard(match.key)
        return False
    return True


def is_what_it_says(chunk: StoredChunk, match: Match, tokens: Sequence[int]) -> bool:
    """Whether a chunk has a match's tokens; for an exact match, exact K/V and its history too."""
    here = np.asarray(tokens[match.span.start : match.span.stop], "<u4").tobytes()
    entry, first = chunk.entry, match.offset * TOKEN_BYTES
    if entry.tokens[first : first + len(here)] != here:
        return False
    if match.kind is not MatchKind.EXACT:
        return True
    is_named = entry.parent is not None and prefix_key(entry.parent, entry.tokens) == match.key
    is_exact = entry.provenance is Provenance.EXACT
    return is_exact and is_named and entry.home == match.span.start - match.offset


def _as_stored(match: Match, entry: Entry, before: Match | None) -> Match:
    """A moved match, corrected by its frame's own head.

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
