"""keys -> plan. Decides what can be reused from the index alone; loads nothing, never raises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from kvboost.core import (
    TOKEN_BYTES,
    Chunk,
    ChunkKeys,
    Entry,
    FrameKey,
    Match,
    MatchKind,
    Namespace,
    Provenance,
    ReusePlan,
    Span,
)
from kvboost.tiers import anchors
from kvboost.tiers.index import ChunkIndex, shared_head, shared_tail

# A prompt with anything reused takes two attention kernels a layer where a fresh one takes one;
# fewer tokens than this do not pay for that. Generous: 16 tokens are about 1 % of 2,000.
LEAST_TOKENS = 16

# Each moved run has a seam, whose repair costs about this many tokens.
LEAST_MOVED_TOKENS = 32

LONGEST_CHUNK = 4096  # how far to look ahead for the chunk that follows
COMPANY_WINDOW = 4  # tokens: a token is in the prompt if a window around it is
_WINDOW_BYTES, _MARGIN = COMPANY_WINDOW * TOKEN_BYTES, (COMPANY_WINDOW - 1) * TOKEN_BYTES


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
        matches.append(_exact(chunk.span, entry))
    num_tokens = chunks[-1].span.stop
    found = matches[-1].span.stop if matches else 0
    # The last prompt token is always live: its logits choose the first output token, and tiers
    # hold K/V, not logits.
    stop = min(found, num_tokens - 1) // granularity * granularity
    if stop < LEAST_TOKENS:
        return ReusePlan(num_tokens)
    return ReusePlan(num_tokens, tuple(matches)).before(stop)


def find_moved(
    plan: ReusePlan,
    chunks: Sequence[Chunk],
    index: ChunkIndex,
    space: Namespace,
    *,
    same_company: bool = False,
) -> ReusePlan:
    """Add moved text: what follows the exact prefix and was stored from any position of any prompt.

    Each anchor that the index knows is verified token by token and extended both ways, across
    chunks that were computed one after the other. Of several copies, the one with the fewest
    strangers in its company is taken; with `same_company`, only one that has none.
    """
    cursor = plan.matches[-1].span.stop if plan.matches else 0
    text = b"".join(chunk.tokens for chunk in chunks)
    tokens = np.frombuffer(text, dtype="<u4")[cursor:]
    positions, hashes = anchors.pick(tokens, anchors.salt(space))
    matches = list(plan.matches)
    company = Company(text, index)
    for position, anchor in zip((positions + cursor).tolist(), hashes.tolist(), strict=True):
        if position < cursor:
            continue  # inside the last run, or before it, where that run could not reach
        seen = index.sightings(anchor, space)
        if same_company:
            seen = [each for each in seen if not company.before(each[0])]
        runs = [_run_around(position, *each, text, cursor, index) for each in seen]
        run = _best(runs, company, same_company=same_company)
        matches += run
        cursor = run[-1].span.stop if run else cursor
    return ReusePlan(plan.num_tokens, tuple(matches))


def _best(runs: Sequence[list[Match]], company: Company, *, same_company: bool) -> list[Match]:
    """The run with the fewest strangers before it, unless it is much shorter than others."""
    least = max([LEAST_MOVED_TOKENS, *(_length(run) / 2 for run in runs)])
    runs = [run for run in runs if _length(run) >= least]
    if len(runs) < 2 and not same_company:
        return runs[0] if runs else []

    def rank(run: list[Match]) -> tuple[float, bool, int]:
        is_exact = run[0].provenance is Provenance.EXACT
        return company.strangers(run[0]), not is_exact, -_length(run)

    best = min(runs, key=rank, default=[])
    return [] if same_company and best and company.strangers(best[0]) else best


def _length(run: Sequence[Match]) -> int:
    return run[-1].span.stop - run[0].span.start if run else 0


def _head_of_child(rest: Sequence[Chunk], key: ChunkKeys, index: ChunkIndex) -> list[Match]:
    # Two chunks are enough to meet a stored one that is longer than ours (cuts can move).
    tokens = b"".join(chunk.tokens for chunk in rest[:2])
    entry, num_shared = index.nearest_child(key.parent, tokens)
    if entry is None or num_shared == 0 or entry.prefix is None:
        return []
    start = rest[0].span.start
    return [_exact(Span(start, start + num_shared), entry)]


def _run_around(
    position: int, seen: Entry, offset: int, text: bytes, start: int, index: ChunkIndex
) -> list[Match]:
    """The longest run of stored tokens around a position, within [start, end of text - 1).

    Token `offset` of the entry seems to match the one at `position`, which is verified here.
    """
    stop = len(text) // TOKEN_BYTES - 1
    first = position - offset  # position of the chunk's first token
    end = min(stop, first + seen.num_tokens)
    ahead = shared_head(_part(seen.tokens, offset, seen.num_tokens), _part(text, position, end))
    if ahead == 0:
        return []
    back = shared_tail(_part(seen.tokens, 0, offset), _part(text, max(start, first), position))
    before = _before(seen, first, start, text, index) if back == offset else []
    after = []
    if offset + ahead == seen.num_tokens:
        after = _after(seen, position + ahead, stop, text, index)
    pieces = [*before, (seen, first, offset - back, offset + ahead), *after]
    return [_moved(*piece, follows=number > 0) for number, piece in enumerate(pieces)]


def _before(
    entry: Entry, first: int, start: int, text: bytes, index: ChunkIndex
) -> list[tuple[Entry, int, int, int]]:
    """The chunks before an entry at `first`, as far back as the text matches."""
    pieces: list[tuple[Entry, int, int, int]] = []
    while (before := index.before(entry)) is not None:
        if before.home + before.num_tokens != entry.home:
            break  # the same tokens as those it was computed after, but from another position
        entry, stop, first = before, first, first - before.num_tokens
        back = shared_tail(entry.tokens, _part(text, max(start, first), stop))
        if back:
            pieces.insert(0, (entry, first, entry.num_tokens - back, entry.num_tokens))
        if back < entry.num_tokens:
            break
    return pieces


def _after(
    entry: Entry, position: int, stop: int, text: bytes, index: ChunkIndex
) -> list[tuple[Entry, int, int, int]]:
    """The chunks after an entry that ends at `position`, as far as the text matches."""
    pieces: list[tuple[Entry, int, int, int]] = []
    while True:
        rest = _part(text, position, min(stop, position + LONGEST_CHUNK))
        after, ahead = index.nearest_child(entry.key, rest)
        if after is None or entry.home + entry.num_tokens != after.home:
            return pieces
        pieces.append((after, position, 0, ahead))
        if ahead < after.num_tokens:
            return pieces
        entry, position = after, position + ahead


def _part(text: bytes, start: int, stop: int) -> bytes:
    return text[start * TOKEN_BYTES : stop * TOKEN_BYTES]


def _moved(entry: Entry, first: int, start: int, stop: int, *, follows: bool) -> Match:
    """Tokens [start, stop) of an entry whose first token is, or would be, at `first`."""
    return Match(
        span=Span(first + start, first + stop),
        key=entry.key,
        num_tokens=entry.num_tokens,
        kind=MatchKind.MOVED,
        offset=start,
        delta=first - entry.home,
        follows=follows,
        provenance=entry.provenance,
    )


def _exact(span: Span, entry: Entry) -> Match:
    follows = span.start > 0
    return Match(span, entry.key, entry.num_tokens, MatchKind.EXACT, follows=follows)


class Company:
    """Counts strangers: tokens before a stored chunk that the prompt does not have. For one lookup.

    K/V depends on everything before it. A copy that was computed after the same documents in
    another order is closer to a full prefill than one that was computed after other text, and it
    carries nothing that the prompt does not say itself.
    """

    def __init__(self, text: bytes, index: ChunkIndex) -> None:
        self._text, self._index = text, index
        self._strangers: dict[FrameKey, float] = {}  # before a chunk

    @cached_property
    def _windows(self) -> set[bytes]:
        return set(_windows_of(self._text))

    def strangers(self, match: Match) -> float:
        """Tokens before a stored text that are not in the prompt.

        Infinite if a chunk before it has left the store, or if any of this is approximate.
        """
        entry = self._index.get(match.key)
        if entry is None or (before := self.before(entry)) == math.inf:
            return math.inf
        stop = match.offset * TOKEN_BYTES
        return before + self._missing(entry, entry.tokens[:stop], entry.tokens[stop:])

    def before(self, entry: Entry) -> float:
        """Strangers before an entry's first token."""
        chain = [entry]
        while (last := chain[-1]).key not in self._strangers:
            parent = self._index.before(last)
            is_known = last.provenance is Provenance.EXACT
            if is_known and parent is not None and parent.home + parent.num_tokens == last.home:
                chain.append(parent)
            else:
                self._strangers[last.key] = 0 if is_known and last.home == 0 else math.inf
        while len(chain) > 1:
            parent, child = chain.pop(), chain[-1]
            missing = self._missing(parent, parent.tokens, child.tokens)
            self._strangers[child.key] = self._strangers[parent.key] + missing
        return self._strangers[entry.key]

    def _missing(self, entry: Entry, said: bytes, right: bytes) -> int:
        """Tokens of `said`, the first ones of an entry, that are in no window of the prompt."""
        before = self._index.before(entry)
        left = b"" if before is None else before.tokens[-_MARGIN:]
        text = left + said + right[:_MARGIN]
        found = [window in self._windows for window in _windows_of(text)]
        num_left, num_said = len(left) // TOKEN_BYTES, len(said) // TOKEN_BYTES
        if not any(found):
            return num_said
        if all(found):
            return 0
        last = range(num_left, num_left + num_said)
        return sum(not any(found[max(0, at - COMPANY_WINDOW + 1) : at + 1]) for at in last)


def _windows_of(text: bytes) -> Iterator[bytes]:
    last = len(text) - _WINDOW_BYTES
    return (text[i : i + _WINDOW_BYTES] for i in range(0, last + 1, TOKEN_BYTES))
