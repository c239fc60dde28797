"""A code file: questions about it, then an edit whose output mostly copies the file."""

from __future__ import annotations

from functools import partial

from examples.common import Trial
from kvboost import KVBoost

FILE = '''\
class Shelf:
    """Books by their number, with room for a fixed number of them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.books: dict[int, str] = {}

    def put(self, number: int, title: str) -> None:
        """Add a book; a full shelf refuses it."""
        if len(self.books) >= self.room:
            raise ValueError("the shelf is full")
        self.books[number] = title

    def take(self, number: int) -> str:
        """Remove a book and return its title."""
        return self.books.pop(number)

    def titles(self) -> list[str]:
        """All titles, in the order of the alphabet."""
        return sorted(self.books.values())

    def longest(self) -> str:
        """The longest title."""
        return max(self.books.values(), key=len)
'''
QUESTIONS = (
    "What does put() do when the shelf is full?",
    "Which method removes a book?",
    "In which order does titles() return the titles?",
)
EDIT = "Write the method take() again, and let it print the title before it returns it."


def run(engine: KVBoost, trial: Trial) -> None:
    for question in QUESTIONS:
        trial.ask(question, partial(engine.chat, about(question), trial.max_new_tokens))
    # Prompt lookup: an edit mostly copies its prompt.
    guessing = {"prompt_lookup_num_tokens": 6}
    trial.ask(EDIT, partial(engine.chat, about(EDIT), 2 * trial.max_new_tokens, **guessing))


def about(question: str) -> list[dict[str, str]]:
    content = f"```python\n{FILE}```\n\n{question}"
    return [
        {"role": "system", "content": "You are a careful programmer. Answer briefly."},
        {"role": "user", "content": content},
    ]
