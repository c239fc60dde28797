"""Reuse by cache size, for LRU caches of all sizes in one pass.

A hit depends on the reuse distance: how much was used since the last use. One distance gives the
answer for every size. Above `max_names` only names with small hashes are followed; a cache then
looks smaller by the same factor, so distances are scaled up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvboost.analyze.logs import LoggedRequest, Names, merged

MAX_NAMES = 400_000  # followed at a time, by all curves together
BATCH_NAMES = 1 << 18  # enough that sorting those of all requests before costs little
NUM_GROUPS = 8  # of the sample: their spread tells its error
WITHIN = 2.36  # standard errors of a mean of 8 that hold 95 % of the cases (Student's t)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """A share of all tokens (or blocks), and how far off it may be in 19 of 20 logs."""

    value: float
    error: float  # 0 where every name was followed


class Curve:
    """The reuse of one kind of names; add the requests, then ask."""

    def __init__(self, sizes: Iterable[float] = (), max_names: int = MAX_NAMES) -> None:
        """`sizes` of caches are answered as they are, others rounded down by up to 9 %."""
        steps = np.exp2(np.arange(0, 400) / 8)
        decades = 10.0 ** np.arange(0, 15)
        self.sizes = np.unique(
            np.concatenate([steps, decades, 2 * decades, 5 * decades, np.fromiter(sizes, float)])
        )
        self.num_names = 0  # uses, not different names
        self.num_tokens = 0.0
        self._max_names = max_names
        self._halvings = 0
        self._used_names = np.empty(0, np.uint64)  # those seen, the latest last
        self._used_tokens = np.empty(0)
        self._cold_names = np.zeros(NUM_GROUPS)
        self._cold_tokens = np.zeros(NUM_GROUPS)
        self._again_tokens = np.zeros((NUM_GROUPS, len(self.sizes) + 1))  # by the least size

    @property
    def sampling_rate(self) -> float:
        """The part of all names that is followed; 1: every answer is exact."""
        return 2.0**-self._halvings

    @property
    def distinct_tokens(self) -> float:
        """Tokens in a cache that never evicts."""
        return float(self._cold_tokens.sum())

    def add(self, names: Names, tokens: Floats, owners: Ints) -> None:
        """The parts of many prompts; `owners` numbers the prompts, from 0 on.

        Each prompt is looked up as a whole, then its parts are used in this order. Give the last
        part first: so the beginning is never older than what follows it, and where names tell all
        that is before them, one that is found has all before it found too.
        """
        self.num_names += len(names)
        self.num_tokens += float(tokens.sum())
        names = _mixed(names)
        kept = self._is_followed(names)
        self._use(names[kept], tokens[kept], owners[kept])
        while len(self._used_names) > self._max_names:
            self._halvings += 1
            kept = self._is_followed(self._used_names)
            self._used_names, self._used_tokens = self._used_names[kept], self._used_tokens[kept]

    def share(self, cache_tokens: float = math.inf) -> Share:
        """The share of all tokens that a cache of this size would have had."""
        share = self._share(self._missed(cache_tokens), self.num_tokens)
        if not self._halvings or math.isinf(cache_tokens) or not self.num_tokens:
            return share
        # Few sampled names stand for a small cache: its size is known that much less well.
        in_cache = cache_tokens * 2.0**-self._halvings * self.num_names / self.num_tokens
        blur = 2 / math.sqrt(max(in_cache, 5.0))
        larger, smaller = (self._missed(cache_tokens * (1 + by)) for by in (blur, -blur))
        return Share(
            share.value, share.error + float((smaller - larger).sum()) / 2 / self.num_tokens
        )

    def share_of_names(self) -> Share:
        """The share of all blocks (or pieces) that a cache of any size would have had."""
        return self._share(self._cold_names, self.num_names)

    def _share(self, missed: Floats, total: float) -> Share:
        """What was not missed. The total is known, so names that all prompts have do no harm."""
        if not total:
            return Share(0.0, 0.0)
        value = 1 - float(missed.sum()) / total
        if not self._halvings:
            return Share(max(0.0, value), 0.0)
        by_group = missed * NUM_GROUPS / total
        error = WITHIN * float(by_group.std(ddof=1)) / math.sqrt(NUM_GROUPS)
        return Share(min(1.0, max(0.0, value)), error)

    def _missed(self, cache_tokens: float) -> Floats:
        """Tokens that were not there, by group."""
        if math.isinf(cache_tokens):
            return self._cold_tokens
        too_large = np.searchsorted(self.sizes, cache_tokens, side="right")
        missed: Floats = self._cold_tokens + self._again_tokens[:, too_large:].sum(axis=1)
        return missed

    def _is_followed(self, names: Names) -> npt.NDArray[np.bool_]:
        return names <= np.uint64((1 << 64 - self._halvings) - 1)

    def _use(self, names: Names, tokens: Floats, owners: Ints) -> None:
        """Everything used so far and now is one sequence, in which places are compared."""
        num_before = len(self._used_names)
        names = np.concatenate([self._used_names, names])
        tokens = np.concatenate([self._used_tokens, tokens])
        owners = np.concatenate([np.full(num_before, -1), owners])
        order = np.argsort(names, kind="stable")
        is_same = np.zeros(len(names), np.bool_)
        is_same[1:] = names[order[1:]] == names[order[:-1]]
        # What occurs twice in a prompt is one entry of the cache, with the tokens of both.
        is_latest = np.ones(len(names), np.bool_)
        is_latest[:-1] = ~(is_same[1:] & (owners[order[1:]] == owners[order[:-1]]))
        latest = np.flatnonzero(is_latest)
        uses, counted = np.zeros(len(names)), np.zeros(len(names))
        uses[order[latest]] = np.diff(latest, prepend=-1)
        counted[order[latest]] = np.diff(np.cumsum(tokens[order])[latest], prepend=0.0)
        tokens[order[~is_latest]] = 0
        order = order[latest]
        is_same = np.zeros(len(order), np.bool_)
        is_same[1:] = names[order[1:]] == names[order[:-1]]
        previous = np.full(len(names), -1)
        previous[order[is_same]] = order[np.flatnonzero(is_same) - 1]

        used = np.sort(order[order >= num_before])
        cold = used[previous[used] < 0]
        self._count_cold(names[cold], uses[cold], counted[cold])
        distances = _distances(used, previous, owners, tokens) * 2.0**self._halvings
        is_again = previous[used] >= 0
        again = used[is_again]
        self._count_again(names[again], counted[again], distances[is_again] + tokens[again])

        is_last = np.ones(len(order), np.bool_)
        is_last[:-1] = ~is_same[1:]
        lasts = np.sort(order[is_last])
        self._used_names, self._used_tokens = names[lasts], tokens[lasts]

    def _count_cold(self, names: Names, uses: Floats, tokens: Floats) -> None:
        groups, weight = _groups(names), 2.0**self._halvings
        self._cold_names += np.bincount(groups, uses * weight, NUM_GROUPS)
        self._cold_tokens += np.bincount(groups, tokens * weight, NUM_GROUPS)

    def _count_again(self, names: Names, tokens: Floats, distances: Floats) -> None:
        width = len(self.sizes) + 1
        bins = _groups(names) * width + np.searchsorted(self.sizes, distances)
        counts = np.bincount(bins, tokens * 2.0**self._halvings, NUM_GROUPS * width)
        self._again_tokens += counts.reshape(NUM_GROUPS, width)


def _groups(names: Names) -> Ints:
    return (names & np.uint64(NUM_GROUPS - 1)).astype(np.int64)


def _mixed(names: Names) -> Names:
    """Names spread evenly over all numbers; traces may prefer small ones."""
    names = (names ^ (names >> np.uint64(30))) * _MIX[0]
    names = (names ^ (names >> np.uint64(27))) * _MIX[1]
    return names ^ (names >> np.uint64(31))


def _distances(used: Ints, previous: Ints, owners: Ints, tokens: Floats) -> Floats:
    """Tokens of different names between each use and the one before; nonsense for first uses.

    Counted from the start of the prompt: what is used after place `p` and before the prompt at `b`
    are the names whose first use after `p` is before `b`, those with previous <= p.
    """
    upto = np.cumsum(tokens)
    before = float(tokens[owners < 0].sum())
    begins = np.searchsorted(owners[used], owners[used])
    older = _tokens_of_older(previous[used], begins, tokens[used])
    distances: Floats = before + older - upto[previous[used]]
    return distances


def _tokens_of_older(previous: Ints, begins: Ints, tokens: Floats) -> Floats:
    """For each place, the tokens of those before `begins` whose previous is not after its own.

    A wavelet tree: time is halved again and again, oldest first in each part. A place whose
    `begins` is in the later half takes what is old enough of the earlier one, and goes on there.
    """
    places = np.argsort(previous, kind="stable")
    ages = np.empty_like(places)
    ages[places] = np.arange(len(places))
    asking = np.flatnonzero(previous >= 0)
    begins = begins[asking]
    starts, counts = np.zeros_like(asking), ages[asking] + 1  # of `places`: those old enough
    found = np.zeros(len(asking))
    for bit in reversed(range(len(places).bit_length())):
        halves = places >> bit
        is_early = halves & 1 == 0
        num_early = np.append(0, np.cumsum(is_early))
        early_tokens = np.append(0.0, np.cumsum(np.where(is_early, tokens[places], 0.0)))
        stops = starts + counts
        counts_early = num_early[stops] - num_early[starts]
        is_late = begins >> bit & 1 == 1
        found += np.where(is_late, early_tokens[stops] - early_tokens[starts], 0.0)
        # Small numbers are sorted much faster.
        is_small = len(places) >> bit < 1 << 16
        halves = halves.astype(np.uint16) if is_small else halves
        places = places[np.argsort(halves, kind="stable")]
        starts = begins >> bit << bit
        counts = np.where(is_late, counts - counts_early, counts_early)
    older = np.zeros(len(places))
    older[asking] = found
    return older


@dataclass
class Findings:
    """What was found in a log."""

    num_requests: int = 0
    span_s: float = 0.0  # from the first request to the last; 0 where the log has no times
    prefix: dict[int, Curve] = field(default_factory=dict)  # by tokens in a block
    content: Curve | None = None  # None: the log does not tell


def follow(
    requests: Iterable[LoggedRequest],
    block_tokens: Sequence[int] = (),
    sizes: Sequence[float] = (),
) -> Findings:
    """Read all requests. Without `block_tokens`, the log's own block size is used."""
    findings = Findings()
    for batch in _batches(requests):
        if not findings.num_requests:
            has_pieces = batch[0].pieces is not None
            block_tokens = block_tokens or (batch[0].block_tokens,)
            bound = MAX_NAMES // (len(block_tokens) + has_pieces)
            findings.prefix = {size: Curve(sizes, bound) for size in block_tokens}
            findings.content = Curve(sizes, bound) if has_pieces else None
        findings.num_requests += len(batch)
        findings.span_s = batch[-1].at_s
        for size, curve in findings.prefix.items():
            curve.add(*_blocks(batch, size))
        if findings.content:
            findings.content.add(*_pieces(batch))
    return findings


def _batches(requests: Iterable[LoggedRequest]) -> Iterator[list[LoggedRequest]]:
    batch, num_names = [], 0
    for request in requests:
        batch.append(request)
        num_names += len(request.blocks if request.pieces is None else request.pieces)
        if num_names >= BATCH_NAMES:
            yield batch
            batch, num_names = [], 0
    if batch:
        yield batch


def _blocks(batch: list[LoggedRequest], block_tokens: int) -> tuple[Names, Floats, Ints]:
    """The blocks of all prompts with their tokens and owners, each prompt from its end."""
    times = block_tokens // batch[0].block_tokens
    if times == 1:
        names = [request.blocks[::-1] for request in batch]
    else:
        names = [merged(request.blocks, times)[::-1] for request in batch]
    counts = np.array([len(each) for each in names])
    tokens = np.full(counts.sum(), block_tokens, np.float64)
    num_tokens = np.array([request.num_tokens for request in batch])
    rests = (np.cumsum(counts) - counts)[counts > 0]
    tokens[rests] = (num_tokens - block_tokens * (counts - 1))[counts > 0]
    return np.concatenate(names), tokens, np.repeat(np.arange(len(batch)), counts)


def _pieces(batch: list[LoggedRequest]) -> tuple[Names, Floats, Ints]:
    names = [each.pieces[::-1] for each in batch if each.pieces is not None]
    tokens = [each.piece_tokens[::-1] for each in batch if each.piece_tokens is not None]
    owners = np.repeat(np.arange(len(batch)), [len(each) for each in names])
    return np.concatenate(names), np.concatenate(tokens).astype(np.float64), owners
