"""Questions whose answers tell which question they belong to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG_CHARACTERS = 1200  # of a passage that several questions begin with


@dataclass(frozen=True)
class Question:
    """A request, and what it is answered with when nothing else runs."""

    path: str
    body: dict[str, Any]
    marker: str
    answer: str = ""


def make_questions(count: int, model: str, *, seed: int = 0) -> list[Question]:
    """Short and long ones, for both endpoints, each about a number of its own."""
    chance = random.Random(seed)
    markers = chance.sample(range(10_000, 99_999), count)
    pages = sorted(topics.values(), key=len)[-4:]
    return [_question(n, str(markers[n]), model, pages, chance) for n in range(count)]


def _question(
    number: int, marker: str, model: str, pages: Sequence[str], chance: random.Random
) -> Question:
    passage = pages[number % len(pages)][:LONG_CHARACTERS] + "\n\n" if number % 3 == 0 else ""
    body: dict[str, Any] = {"model": model, "temperature": 0, "seed": number}
    body["max_tokens"] = chance.choice([8, 12, 16, 24])
    line = f"The code of this box is {marker}. "
    if number % 2:
        return Question(COMPLETIONS, body | {"prompt": passage + 2 * line + line[:-7]}, marker)
    text = f"{passage}{line}Repeat the code of this box, then count up from it."
    return Question(CHAT, body | {"messages": [{"role": "user", "content": text}]}, marker)


def tellable(questions: Sequence[Question]) -> list[Question]:
    """Those whose answer no other question has, so that a mix-up would be seen."""
    counts = Counter(question.answer for question in questions)
    return [each for each in questions if each.answer and counts[each.answer] == 1]


def text_of(choice: dict[str, Any]) -> str:
    """The text of an answer, or what a piece of a stream adds to it."""
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")
