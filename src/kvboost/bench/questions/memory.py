"""What does stored K/V weigh, and how often must text come back until storing it has paid?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from kvboost.bench.questions.subjects import (
    Pair,
    Row,
    Subject,
    continued,
    middle,
    pick,
    round_ms,
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


def break_even(store_ms: float, prefill_ms: float, warm_ms: float) -> float | None:
    """How often text must come back until storing it has paid; None: it never does."""
    saved_ms = prefill_ms - warm_ms
    return round(store_ms / saved_ms, 4) if saved_ms > 0 else None


def _round(subject: Subject, num_tokens: int, seed: int) -> dict[int, tuple[First, Pair]]:
    words = subject.words(seed)
    text = take(words, num_tokens)
    sessions = {bits: subject.session(reuse="exact", kv_cache_bits=bits) for bits in BITS}
    firsts: dict[int, First] = {}
    for bits, session in sessions.items():
        cold, store_ms = session.ask(text)
        firsts[bits] = First(cold.ttft_ms, store_ms, session.stored_bytes_per_token())
    tokens = continued(text, words, 0.95)
    pairs = subject.beside(sessions, tokens, seed)
    return {bits: (firsts[bits], pairs[bits]) for bits in BITS}


def _row(rounds: list[tuple[First, Pair]]) -> Row:
    firsts, pairs = zip(*rounds, strict=True)
    row = middle(pairs)
    store_ms = round_ms([first.store_ms for first in firsts])
    prefill_ms = round_ms([first.prefill_ms for first in firsts])
    stored = statistics.median(first.bytes_per_token for first in firsts)
    return {
        "kv_bytes_per_token": round(stored, 1),
        "store_ms": store_ms,
        "prefill_ms": prefill_ms,
        "break_even_requests": break_even(store_ms, prefill_ms, row["ours_ms"]),
        **pick(row, "load_ms", "bare_ms", "top1", "cached_share", "pairs", warm_ms="ours_ms"),
    }
