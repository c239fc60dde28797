"""A chatbot: its rules are prefilled once and reused for every question."""

from __future__ import annotations

from functools import partial

from examples.common import Trial
from kvboost import KVBoost

RULES = """You are the assistant of the Lantern Inn, a small hotel by the sea. Be friendly and
brief. Breakfast is served from seven to ten, on Sundays until eleven. Rooms are ready at three in
the afternoon and are given back at eleven in the morning. The sauna is free for guests; towels lie
at the desk. Dogs are welcome on the ground floor. The boat to the lighthouse leaves at noon from
the pier in front of the house and is back at four. Bicycles are lent by the day, for a deposit.
The kitchen closes at nine; after that there is soup at the bar. Guests who arrive after midnight
find their key in the box beside the door, and the number of the box in their letter."""
QUESTIONS = (
    "When is breakfast on Sundays?",
    "May I bring my dog?",
    "When does the boat leave?",
    "I arrive after midnight. Where is my key?",
)


def run(engine: KVBoost, trial: Trial) -> None:
    for question in trial.questions(QUESTIONS):
        messages = [
            {"role": "system", "content": RULES},
            {"role": "user", "content": question},
        ]
        trial.ask(question, partial(engine.chat, messages, trial.max_new_tokens))
