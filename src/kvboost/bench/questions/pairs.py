"""Questions answered by pairs: ours and the bare model on the same prompts in the same rounds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.bench.questions.subjects import (
    QUESTION_TOKENS,
    Pair,
    Row,
    Subject,
    continued,
    layouts,
    middle,
    pick,
    round_ms,
    shuffled,
    take,
)
from kvboost.policy.cost import CostModel

SHARES = (0.25, 0.5, 0.75, 0.95)
QUICK_SHARES = (0.5, 0.95)
MODES: dict[str, dict[str, Any]] = {
    "off": {"reuse": "off"},
    "exact": {"reuse": "exact"},
    "auto": {"reuse": "auto"},
    "deterministic": {"reuse": "exact", "deterministic": True},
}
SIZES = ((32, 0), (64, 0), (128, 0), (128, 32), (256, 0), (256, 64), (512, 0))  # tokens, window
QUICK_SIZES = ((64, 0), (128, 0), (128, 32))
BITS = (16, 8, 4)
STORED_LENGTHS = (512, 1024)
QUICK_STORED_LENGTHS = (512,)


def length(subject: Subject) -> Iterator[Row]:
    """How does the time to the first token grow with the prompt?

    A row for each length and phase: nothing seen, the beginning seen, documents moved.
    """
    for num_tokens in subject.lengths:
        phases: dict[str, list[Pair]] = defaultdict(list)
        for number, seed in enumerate(subject.seeds):
            session, words = subject.session(reuse="auto"), subject.words(seed)
            first, moved = layouts(words, num_tokens)
            asked = {"cold": first, "warm": continued(first, words), "moved": moved}
            for phase, tokens in asked.items():
                is_ours_first = subject.is_ours_first(number, num_tokens, phase)
                pair = subject.compare(session, tokens, is_ours_first=is_ours_first)
                phases[phase].append(pair)
        for phase, pairs in phases.items():
            yield {"tokens": num_tokens, "phase": phase, **_both(pairs)}


def share(subject: Subject) -> Iterator[Row]:
    """How does the time to the first token fall with the share of the prompt that is reused?

    A row for each share, where the seen text begins the prompt and where it ends it.
    """
    seen: dict[tuple[str, float], list[Pair]] = defaultdict(list)
    for number, seed in enumerate(subject.seeds):
        session, words = subject.session(reuse="auto"), subject.words(seed)
        text = take(words, subject.num_tokens)
        session.ask(text)
        for each in QUICK_SHARES if subject.is_quick else SHARES:
            for phase, tokens in prompts(text, each, words).items():
                is_ours_first = subject.is_ours_first(number, each, phase)
                pair = subject.compare(session, tokens, is_ours_first=is_ours_first)
                seen[phase, each].append(pair)
    for (phase, each), pairs in sorted(seen.items()):
        fields = {"tokens": subject.num_tokens, "share": each, "phase": phase}
        yield {**fields, **_both(pairs)}


def prompts(text: list[int], share: float, words: Iterator[int]) -> dict[str, list[int]]:
    """A prompt that begins with a share of `text`, and one that has it before its question."""
    kept = text[: round(share * len(text))]
    num_new = len(text) - len(kept)
    before = take(words, num_new - QUESTION_TOKENS)
    return {
        "warm": kept + take(words, num_new),
        "moved": before + kept + take(words, num_new - len(before)),
    }


def _both(pairs: list[Pair]) -> Row:
    return pick(middle(pairs), "ours_ms", "bare_ms", "ratio", "top1", "cached_share", "pairs")


def modes(subject: Subject) -> Iterator[Row]:
    """What does each mode of reuse cost and gain? A row for each mode and phase."""
    seen: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for seed in subject.seeds:
        sessions = {mode: subject.session(**options) for mode, options in MODES.items()}
        words = subject.words(seed)
        first, moved = layouts(words, subject.num_tokens)
        for mode, session in sessions.items():
            if mode != "off":  # which stores nothing
                session.ask(first)
        for phase, tokens in {"warm": continued(first, words), "moved": moved}.items():
            for mode, pair in subject.beside(sessions, tokens, seed).items():
                seen[mode, phase].append(pair)
    shown = ("bare_ms", "bare_total_ms", "ratio", "top1", "cached_share", "pairs")
    for (mode, phase), pairs in seen.items():
        row = pick(middle(pairs), *shown, ttft_ms="ours_ms", total_ms="ours_total_ms")
        yield {"mode": mode, "phase": phase, "tokens": subject.num_tokens, **row}


def chunk(subject: Subject) -> Iterator[Row]:
    """How large should chunks be, and may their borders move to the end of a line?

    A row for each size and window, on documents that have moved.
    """
    sizes = QUICK_SIZES if subject.is_quick else SIZES
    seen: dict[tuple[int, int], list[Pair]] = {size: [] for size in sizes}
    stored: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    for seed in subject.seeds:
        sessions = {
            (size, window): subject.session(
                cost=CostModel(), reuse="auto", chunk_size=size, chunk_boundary_window=window
            )
            for size, window in sizes
        }
        first, moved = layouts(subject.words(seed), subject.num_tokens)
        for each, session in sessions.items():
            session.ask(first)
            stored[each].append(session.stored_bytes_per_token())
        for each, pair in subject.beside(sessions, moved, seed).items():
            seen[each].append(pair)
    shown = ("bare_ms", "ratio", "found_share", "top1", "pairs")
    for (size, window), pairs in seen.items():
        yield {
            "chunk_size": size,
            "window": window,
            "tokens": subject.num_tokens,
            "stored_bytes_per_token": round(statistics.median(stored[size, window]), 1),
            **pick(middle(pairs), *shown, ttft_ms="ours_ms"),
        }


@dataclass(frozen=True)
class First:
    """The first time that a text comes: computed and stored."""

    prefill_ms: float
    store_ms: float
    bytes_per_token: float


def memory(subject: Subject) -> Iterator[Row]:
    """What does stored K/V weigh, and how often must text come back until storing it has paid?

    A row for each length and number of bits, on a prompt whose beginning comes back.
    """
    for num_tokens in QUICK_STORED_LENGTHS if subject.is_quick else STORED_LENGTHS:
        measured = [_round(subject, num_tokens, seed) for seed in subject.seeds]
        for bits in BITS:
            rounds = [each[bits] for each in measured]
            yield {"tokens": num_tokens, "bits": bits, **_memory_row(rounds)}


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
    pairs = subject.beside(sessions, continued(text, words, 0.95), seed)
    return {bits: (firsts[bits], pairs[bits]) for bits in BITS}


def _memory_row(rounds: list[tuple[First, Pair]]) -> Row:
    firsts, pairs = zip(*rounds, strict=True)
    stored = statistics.median(first.bytes_per_token for first in firsts)
    shown = ("load_ms", "bare_ms", "top1", "cached_share", "pairs")
    return {
        "kv_bytes_per_token": round(stored, 1),
        "store_ms": round_ms([first.store_ms for first in firsts]),
        "prefill_ms": round_ms([first.prefill_ms for first in firsts]),
        "break_even_requests": break_even(rounds),
        **pick(middle(pairs), *shown, warm_ms="ours_ms"),
    }
