"""How large should chunks be, and may their borders move to the end of a line?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from kvboost.bench.questions.subjects import Pair, Row, Session, Subject, layouts, middle, pick
from kvboost.policy.cost import CostModel

SIZES = ((32, 0), (64, 0), (128, 0), (128, 32), (256, 0), (256, 64), (512, 0))  # tokens, window
QUICK_SIZES = ((64, 0), (128, 0), (128, 32))


def chunk(subject: Subject) -> Iterator[Row]:
    """A row for each size and window, on documents that have moved."""
    sizes = QUICK_SIZES if subject.is_quick else SIZES
    seen: dict[tuple[int, int], list[Pair]] = {size: [] for size in sizes}
    stored: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    for seed in subject.seeds:
        sessions = {size: _session(subject, *size) for size in sizes}
        first, moved = layouts(subject.words(seed), subject.num_tokens)
        for size, session in sessions.items():
            session.ask(first)
            stored[size].append(session.stored_bytes_per_token())
        for size, pair in subject.beside(sessions, moved, seed).items():
            seen[size].append(pair)
    for (chunk_size, window), pairs in seen.items():
        yield {
            "chunk_size": chunk_size,
            "window": window,
            "tokens": subject.num_tokens,
            "stored_bytes_per_token": round(statistics.median(stored[chunk_size, window]), 1),
            **_row(pairs),
        }


def _session(subject: Subject, size: int, window: int) -> Session:
    return subject.session(
        cost=CostModel(), reuse="auto", chunk_size=size, chunk_boundary_window=window
    )


def _row(pairs: list[Pair]) -> Row:
    return pick(
        middle(pairs), "bare_ms", "ratio", "found_share", "top1", "pairs", ttft_ms="ours_ms"
    )
