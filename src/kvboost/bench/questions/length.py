"""How does the time to the first token grow with the prompt?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvboost.bench.questions.subjects import (
    Pair,
    Row,
    Subject,
    continued,
    layouts,
    middle,
    pick,
)


def length(subject: Subject) -> Iterator[Row]:
    """A row for each length and phase: nothing seen, the beginning seen, documents moved."""
    for num_tokens in subject.lengths:
        phases: dict[str, list[Pair]] = defaultdict(list)
        for number, seed in enumerate(subject.seeds):
            session, words = subject.session(reuse="auto"), subject.words(seed)
            first, moved = layouts(words, num_tokens)
            prompts = {"cold": first, "warm": continued(first, words), "moved": moved}
            for phase, tokens in prompts.items():
                is_ours_first = subject.is_ours_first(number, num_tokens, phase)
                pair = subject.compare(session, tokens, is_ours_first=is_ours_first)
                phases[phase].append(pair)
        for phase, pairs in phases.items():
            row = pick(middle(pairs), "ours_ms", "bare_ms", "ratio", "top1", "cached_share")
            yield {"tokens": num_tokens, "phase": phase, **row, "pairs": len(pairs)}
