"""What does stored K/V weigh, and how often must text come back until storing it has paid?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvboost.bench.questions.subjects import (
    Pair,
    Row,
    Subject,
    continued,
    middle,
    pick,
    round_ms,
    shuffled,
    take,
)

BITS = (16, 8, 4)
LENGTHS = (512, 1024)
QUICK_LENGTHS = (512,)


@dataclass(frozen=True)
class First:
    """The first time that a text comes: computed and stored."""

    prefill_ms: float
    store_ms: float
    bytes_per_token: float


def memory(subject: Subject) -> Iterator[Row]:
    """A row for each length and number of bits, on a prompt whose beginning comes back."""
    for num_tokens in QUICK_LENGTHS if subject.is_quick else LENGTHS:
        measured = [_round(subject, num_tokens, seed) for seed in subject.seeds]
        for bits in BITS:
            rounds = [each[bits] for each in measured]
            yield {"tokens": num_tokens, "bits": bits, **_row(rounds)}


def break_even(rounds: Sequence[tuple[First, Pair]]) -> float | None:
    """How often text must come back until storing it has paid, the median of the rounds.

    None: it never does.
    """
    saved_ms = [first.prefill_ms - pair.ours_ms for first, pair in rounds]
    middle_round = statistics.median(
        first.store_ms / saved if saved > 0 else math.inf
        for (first, _), saved in zip(rounds, saved_ms, strict=True)
    )
    return round(middle_round, 4) if math.isfinite(middle_round) else None


def _round(subject: Subject, num_tokens: int, seed: int) -> dict[int, tuple[First, Pair]]:
    words = subject.words(seed)
    text = take(words, num_tokens)
    sessions = {bits: subject.session(reuse="exact", kv_cache_bits=bits) for bits in BITS}
    firsts: dict[int, First] = {}
    for bits in shuffled(BITS, seed):
        cold, store_ms = sessions[bits].ask(text)
        firsts[bits] = First(cold.ttft_ms, store_ms, sessions[bits].stored_bytes_per_token())
    tokens = continued(text, words, 0.95)
    pairs = subject.beside(sessions, tokens, seed)
    return {bits: (firsts[bits], pairs[bits]) for bits in BITS}


def _row(rounds: list[tuple[First, Pair]]) -> Row:
    firsts, pairs = zip(*rounds, strict=True)
    row = middle(pairs)
    stored = statistics.median(first.bytes_per_token for first in firsts)
    return {
        "kv_bytes_per_token": round(stored, 1),
        "store_ms": round_ms([first.store_ms for first in firsts]),
        "prefill_ms": round_ms([first.prefill_ms for first in firsts]),
        "break_even_requests": break_even(rounds),
        **pick(row, "load_ms", "bare_ms", "top1", "cached_share", "pairs", warm_ms="ours_ms"),
    }
