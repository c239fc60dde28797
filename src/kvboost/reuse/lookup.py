"""keys -> plan. Decides what can be reused from the index alone; loads nothing, never raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvboost.core import Chunk, ChunkKeys, Match, MatchKind, ReusePlan, Span
from kvboost.tiers.index import ChunkIndex

# A prompt with anything reused takes two attention kernels a layer where a fresh one takes one;
# fewer tokens than this do not pay for that. Generous: 16 tokens are about 1 % of 2,000.
LEAST_TOKENS = 16


def find(
    chunks: Sequence[Chunk], keys: Sequence[ChunkKeys], index: ChunkIndex, granularity: int = 1
) -> ReusePlan:
    """The longest stored prefix of the prompt, cut to a multiple of `granularity` tokens.

    Whole chunks are found by their prefix key. Inside the first chunk that is not stored, reuse
    goes on as far as the tokens agree with a stored chunk of the same history: by causality the
    K/V of a chunk's first m tokens does not depend on the rest.
    """
    matches: list[Match] = []
    for depth, (chunk, key) in enumerate(zip(chunks, keys, strict=True)):
        entry = index.get(key.prefix)
        if entry is None:
            matches += _head_of_child(chunks[depth:], key, index)
            break
        matches.append(Match(chunk.span, key.prefix, entry.num_tokens, MatchKind.EXACT))
    num_tokens = chunks[-1].span.stop
    found = matches[-1].span.stop if matches else 0
    # The last prompt token is always live: its logits choose the first output token, and tiers
    # hold K/V, not logits.
    stop = min(found, num_tokens - 1) // granularity * granularity
    if stop < LEAST_TOKENS:
        return ReusePlan(num_tokens)
    return ReusePlan(
        num_tokens, tuple(_cut(match, stop) for match in matches if match.span.start < stop)
    )


def _head_of_child(rest: Sequence[Chunk], key: ChunkKeys, index: ChunkIndex) -> list[Match]:
    # Two chunks are enough to meet a stored one that is longer than ours (cuts can move).
    tokens = b"".join(chunk.tokens for chunk in rest[:2])
    entry, num_shared = index.nearest_child(key.parent, tokens)
    if entry is None or entry.prefix is None or num_shared == 0:
        return []
    start = rest[0].span.start
    span = Span(start, start + num_shared)
    return [Match(span, entry.prefix, entry.num_tokens, MatchKind.EXACT)]


def _cut(match: Match, stop: int) -> Match:
    return replace(match, span=Span(match.span.start, min(match.span.stop, stop)))
