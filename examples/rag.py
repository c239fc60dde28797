"""Documents in any order: prefilled once, reused at any position in later prompts."""

from __future__ import annotations

from functools import partial

from examples.common import Trial
from kvboost import KVBoost

DOCUMENTS = {
    "library": """The library of Tarn keeps one card for each book. The card names the author, the
title, the year and the shelf. When a book is lent, the librarian moves its card to a second drawer
and writes the reader's number on a slip. Every evening the slips are sorted by the date on which
the books are due, and a letter goes to each reader who is late. In winter the drawer of lent books
is always the fuller one, for the evenings are long. A child once asked why the cards are not thrown
away when a book is lost. The librarian answered that a card without a book is still a promise.""",
    "ferry": """The ferry from Tarn to the islands leaves at seven in the morning and at four in the
afternoon. In winter there is one crossing a day, at noon. Cars must be on the quay twenty minutes
before the ferry leaves. The crossing takes fifty minutes when the sea is calm and more than an hour
when it is not. Dogs travel free of charge; bicycles pay half. The captain of the ferry is called
Mina Holloway. She has made the crossing more than nine thousand times and keeps a list of every
day on which she turned back.""",
    "market": """The market of Tarn is held on Wednesdays and Saturdays in the square behind the
church. Bread and cheese are sold in the first row, tools and wool in the second. Stalls pay by the
metre. Since the flood of 1962 the fish stalls stand on the bridge, where the water runs off by
itself. The bell of the church opens and closes the market. Whoever sells after the bell pays for a
round of soup in the inn, which is why some farmers are said to be hungry on purpose.""",
}
ASKED = (
    (("library", "ferry", "market"), "How is a book's card moved when it is lent?"),
    (("ferry", "library", "market"), "What is the captain of the ferry called?"),
    (("market", "ferry", "library"), "Where do the fish stalls stand?"),
    (("library", "market"), "On which days is the market held?"),
)

QUALITY = """Moved text is approximate, so outputs can differ.
In 8 runs over 203 prompts (models up to 1.5B, bf16 or fp32, default repair), 90 to 98 % of output
tokens agree with a full prefill (top-1, by run), mean KL divergence is 0.010 to 0.132, and 103 of
203 outputs are identical."""


def run(engine: KVBoost, trial: Trial) -> None:
    for names, question in ASKED:
        texts = [DOCUMENTS[name] for name in names]
        listed = "\n\n".join(texts)
        content = f"Answer from the documents.\n\n{listed}\n\nQuestion: {question}"
        messages = [{"role": "user", "content": content}]
        call = partial(engine.chat, messages, trial.max_new_tokens, documents=texts)
        trial.ask(question, call, reuse="auto")
    trial.say(" ".join(QUALITY.split()), "dim")
