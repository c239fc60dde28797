"""How is text found again that has moved: by whole chunks, by its words, by its documents?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost.bench.questions.subjects import (
    NUM_DOCUMENTS,
    QUESTION_TOKENS,
    Pair,
    Row,
    Session,
    Subject,
    layouts,
    middle,
    pick,
)
from kvboost.engine.texts import PREFACE, tokens_of
from kvboost.engine.warm import warm_up
from kvboost.policy.cost import CostModel
from kvboost.reuse.chunks import split

CHUNK_SIZE = 128

STRATEGIES: dict[str, dict[str, Any]] = {
    "prefix": {"reuse": "exact"},
    "anchors": {"reuse": "auto"},
    "boundary": {"reuse": "auto", "chunk_boundary_window": 32},
    "document": {"reuse": "auto"},
}
"""Options of each; of "document" each text is read by itself, behind a preface."""


def chunking(subject: Subject) -> Iterator[Row]:
    """A row for each strategy; of "fixed", which ours does not have, only what it would find."""
    grid: list[float] = []
    seen: dict[str, list[Pair]] = {strategy: [] for strategy in STRATEGIES}
    for seed in subject.seeds:
        first, moved = layouts(subject.words(seed), subject.num_tokens)
        grid.append(grid_share(first, moved))
        sessions = {
            strategy: subject.session(cost=CostModel(), chunk_size=CHUNK_SIZE, **options)
            for strategy, options in STRATEGIES.items()
        }
        for strategy, session in sessions.items():
            _read(session, first, is_by_document=strategy == "document")
        for strategy, pair in subject.beside(sessions, moved, seed).items():
            seen[strategy].append(pair)
    found_share = round(statistics.mean(grid), 4)
    yield {"strategy": "fixed", "found_share": found_share, "ratio": None, "top1": None}
    for strategy, pairs in seen.items():
        yield {"strategy": strategy, **_row(pairs)}


def grid_share(seen: Sequence[int], prompt: Sequence[int], chunk_size: int = CHUNK_SIZE) -> float:
    """Share of a prompt in chunks of a fixed grid that were chunks of `seen`, at any place."""
    known = {chunk.tokens for chunk in split(seen, chunk_size)}
    found = sum(len(c.span) for c in split(prompt, chunk_size) if c.tokens in known)
    return found / len(prompt)


def documents_of(prompt: list[int]) -> list[list[int]]:
    """The documents of a prompt that `layouts` made."""
    size = (len(prompt) - 2 * QUESTION_TOKENS) // NUM_DOCUMENTS
    start = len(prompt) - QUESTION_TOKENS - NUM_DOCUMENTS * size
    return [prompt[start + n * size : start + (n + 1) * size] for n in range(NUM_DOCUMENTS)]


def _read(session: Session, prompt: list[int], *, is_by_document: bool) -> None:
    if not is_by_document:
        session.ask(prompt)
        return
    before = tokens_of(PREFACE, session.tokenizer)
    for document in documents_of(prompt):
        warm_up(document, session.parts, before=before, tenant="")


def _row(pairs: Sequence[Pair]) -> Row:
    return pick(
        middle(pairs), "found_share", "bare_ms", "ratio", "top1", "pairs", ttft_ms="ours_ms"
    )
