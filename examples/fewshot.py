"""Few-shot classification: the same examples precede every text."""

from __future__ import annotations

from functools import partial

from examples.common import Trial
from kvboost import KVBoost

SHOTS = (
    ("The parcel came a day early and nothing was broken.", "praise"),
    ("My invoice shows the old address. Can you change it?", "question"),
    ("Third letter, and still nobody has called me back.", "complaint"),
    ("Which of the two lamps uses less power?", "question"),
    ("The zip tore on the first walk. I expected better.", "complaint"),
    ("Your colleague at the desk was patient and kind.", "praise"),
    ("Do you deliver to the islands in winter?", "question"),
    ("The colour is nothing like the picture.", "complaint"),
    ("Best kettle I have ever owned, thank you.", "praise"),
    ("How do I clean the filter?", "question"),
    ("I paid for express and waited two weeks.", "complaint"),
    ("The repair was quick and cost less than promised.", "praise"),
    ("Is the battery part of the set?", "question"),
    ("The manual is in a language that I do not read.", "complaint"),
    ("Lovely wrapping, my mother was delighted.", "praise"),
    ("May I return it without the box?", "question"),
)
TEXTS = (
    "Can I pay in two parts?",
    "The handle broke after a week.",
    "What a friendly and fast service!",
    "Does it fit a larger bed?",
)


def run(engine: KVBoost, trial: Trial) -> None:
    shots = "\n\n".join(f"Message: {text}\nKind: {kind}" for text, kind in SHOTS)
    for text in TEXTS:
        prompt = f"Each message is praise, a question or a complaint.\n\n{shots}\n\n"
        prompt += f"Message: {text}\nKind:"
        trial.ask(text, partial(engine.generate, prompt, 1))  # the first token is the kind
