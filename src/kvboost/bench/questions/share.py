"""How does the time to the first token fall with the share of the prompt that is reused?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvboost.bench.questions.subjects import (
    QUESTION_TOKENS,
    Pair,
    Row,
    Subject,
    middle,
    pick,
    take,
)

SHARES = (0.25, 0.5, 0.75, 0.95)
QUICK_SHARES = (0.5, 0.95)


def share(subject: Subject) -> Iterator[Row]:
    """A row for each share, where the seen text begins the prompt and where it ends it."""
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
        row = pick(middle(pairs), "ours_ms", "bare_ms", "ratio", "top1", "cached_share")
        fields = {"tokens": subject.num_tokens, "share": each, "phase": phase}
        yield {**fields, **row, "pairs": len(pairs)}


def prompts(text: list[int], share: float, words: Iterator[int]) -> dict[str, list[int]]:
    """A prompt that begins with a share of `text`, and one that has it before its question."""
    kept = text[: round(share * len(text))]
    num_new = len(text) - len(kept)
    before = take(words, num_new - QUESTION_TOKENS)
    return {
        "warm": kept + take(words, num_new),
        "moved": before + kept + take(words, num_new - len(before)),
    }
