"""A conversation: each turn sends the whole history, and only the new text is computed."""

from __future__ import annotations

from functools import partial

from examples.common import Trial
from kvboost import KVBoost

RULES = """You help people to plan a garden. Answer in one or two short sentences. The garden lies
on a slope that faces south; its upper part is dry and stony, its lower part is wet after rain.
There is an old apple tree in the middle, and a wall along the north side that keeps the warmth."""
TURNS = (
    "Where should I plant lavender?",
    "And what grows in the wet part?",
    "What can I grow in the shade of the apple tree?",
    "What should I do first, in spring?",
    "Please sum up the plan.",
)


def run(engine: KVBoost, trial: Trial) -> None:
    messages = [{"role": "system", "content": RULES}]
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answer = trial.ask(turn, partial(engine.chat, list(messages), trial.max_new_tokens))
        messages.append({"role": "assistant", "content": answer})
