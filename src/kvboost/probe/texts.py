"""Documents with planted facts. Nothing in them was ever in another prompt."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

NOUNS = (
    "archive", "balcony", "bridge", "cabinet", "canal", "catalogue", "cellar", "chapel",
    "courtyard", "ferry", "forest", "gallery", "garden", "harbour", "library", "market",
    "meadow", "mill", "museum", "orchard", "river", "station", "terrace", "theatre", "tower",
    "valley", "village", "warehouse", "windmill", "workshop",
)  # fmt: skip
VERBS = (
    "borders", "faces", "feeds", "follows", "hides", "joins", "overlooks", "passes", "precedes",
    "serves", "shelters", "supports", "touches", "warms",
)  # fmt: skip
QUALITIES = (
    "ancient", "broad", "bright", "calm", "crowded", "famous", "gentle", "hidden", "narrow",
    "northern", "patient", "pleasant", "quiet", "remote", "rusty", "silent", "southern", "wooden",
)  # fmt: skip
PLACES = (
    "Arden", "Belmont", "Corvina", "Dunmore", "Elstow", "Farley", "Galen", "Hollis", "Ivanhoe",
    "Jarrow", "Kelso", "Lorne", "Marlow", "Norwood", "Orwell", "Penrith", "Quill", "Rowan",
    "Selby", "Tarland",
)  # fmt: skip
WORDS_PER_SENTENCE = 8
JOINT = re.compile(r"(?<=\d)[ ,-](?=\d)")  # in numbers as some models write them


@dataclass(frozen=True)
class Document:
    """Sentences around a planted fact, behind a record number that no other prompt has."""

    salt: str
    seed: str
    place: str
    code: str
    num_words: int

    @property
    def text(self) -> str:
        """The document."""
        chance = random.Random(self.seed)
        sentences = [_sentence(chance) for _ in range(max(4, self.num_words // WORDS_PER_SENTENCE))]
        middle = len(sentences) // 2
        fact = f"The access code of the {self.place} office is {self.code}."
        return " ".join([f"Record {self.salt}.", *sentences[:middle], fact, *sentences[middle:]])

    @property
    def question(self) -> str:
        """Asks for the fact."""
        return f"What is the access code of the {self.place} office? Reply with the code only."

    @property
    def prompt(self) -> str:
        """The document, then its question."""
        return f"{self.text}\n\n{self.question}"

    def question_first(self) -> str:
        """The question, then the document."""
        return f"{self.question}\n\n{self.text}"

    def edited(self, where: str, chance: random.Random) -> str:
        """The same prompt with another first, middle or last sentence."""
        sentences = self.text.split(". ")
        at = {"beginning": 0, "middle": len(sentences) // 2 - 1, "end": len(sentences) - 2}[where]
        sentences[at] = f"{_sentence(chance)[:-1]} {chance.randrange(10**6)}"
        return f"{'. '.join(sentences)}\n\n{self.question}"

    def salted(self, salt: str) -> Document:
        """The same document behind another record number."""
        return replace(self, salt=salt)

    def holds(self, answer: str) -> bool:
        """Whether an answer has the planted fact."""
        return says(answer, self.code)


class Texts:
    """Makes documents; other seeds give other ones."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self._num_made = 0
        self._codes: set[str] = set()

    def salt(self) -> str:
        """A word of ten digits."""
        return f"{self.chance.randrange(10**10):010}"

    def document(self, num_words: int) -> Document:
        """A new one."""
        self._num_made += 1
        return Document(
            salt=self.salt(),
            seed=f"{self.seed}/{self._num_made}",
            place=PLACES[self._num_made % len(PLACES)],
            code=self._code(),
            num_words=num_words,
        )

    def with_other_code(self, document: Document) -> Document:
        """The same document with another planted fact."""
        return replace(document, code=self._code())

    def _code(self) -> str:
        while (code := str(self.chance.randrange(10_000, 100_000))) in self._codes:
            pass
        self._codes.add(code)
        return code


def says(answer: str, code: str) -> bool:
    """Whether an answer has a code, also as "48,213"."""
    alone = re.compile(rf"(?<!\d){code}(?!\d)")
    return any(map(alone.search, (answer, JOINT.sub("", answer))))


def _sentence(chance: random.Random) -> str:
    return (
        f"The {chance.choice(QUALITIES)} {chance.choice(NOUNS)} {chance.choice(VERBS)} "
        f"the {chance.choice(QUALITIES)} {chance.choice(NOUNS)}."
    )
