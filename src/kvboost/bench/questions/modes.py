"""What does each mode of reuse cost and gain?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvboost.bench.questions.subjects import (
    Pair,
    Row,
    Session,
    Subject,
    continued,
    layouts,
    middle,
    pick,
)

MODES = ("off", "exact", "auto", "deterministic")


def modes(subject: Subject) -> Iterator[Row]:
    """A row for each mode and phase."""
    seen: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for seed in subject.seeds:
        sessions = {mode: _session(subject, mode) for mode in MODES}
        words = subject.words(seed)
        first, moved = layouts(words, subject.num_tokens)
        for mode in MODES[1:]:  # the first one stores nothing
            sessions[mode].ask(first)
        for phase, tokens in {"warm": continued(first, words), "moved": moved}.items():
            pairs = subject.beside(sessions, tokens, seed)
            for mode, pair in pairs.items():
                seen[mode, phase].append(pair)
    for (mode, phase), each in seen.items():
        yield {"mode": mode, "phase": phase, "tokens": subject.num_tokens, **_row(each)}


def _session(subject: Subject, mode: str) -> Session:
    if mode == "deterministic":
        return subject.session(reuse="exact", deterministic=True)
    return subject.session(reuse=mode)


def _row(pairs: list[Pair]) -> Row:
    return pick(
        middle(pairs),
        "bare_ms",
        "bare_total_ms",
        "ratio",
        "top1",
        "cached_share",
        "pairs",
        ttft_ms="ours_ms",
        total_ms="ours_total_ms",
    )
