"""Texts that need no download: pages of Python's documentation, its code, its functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

LEAST_WORDS, MOST_WORDS = 12, 60  # of a paragraph that is dealt
SOURCES = ("textwrap", "heapq", "bisect", "shlex", "fnmatch", "colorsys", "sched", "linecache")
DESCRIBED = ("shutil", "os.path", "statistics", "json", "textwrap", "calendar", "base64")
PLACES = ("Bellmere", "Ashford", "Corvale", "Dunholm", "Eastwick", "Farrow", "Glenside", "Harcot")
THINGS = ("access code", "room number", "meter reading", "invoice number")


@dataclass(frozen=True)
class Fact:
    """A sentence that can stand in a text, what to ask for, and what only the text tells."""

    sentence: str
    question: str
    beginning: str  # of the answer
    answer: str


def reference_pages() -> list[str]:
    """Pages of Python's own documentation, without the lines that are drawn in them."""
    return [re.sub(r"[*=~^]{3,}|\n{3,}", "\n\n", text).strip() for text in topics.values()]


class Dealer:
    """Deals text that was not dealt before, so that a cold prompt is cold."""

    def __init__(self, seed: int, count: Callable[[str], int]) -> None:
        """`count` says how many tokens a text has."""
        self._chance, self._count = random.Random(seed), count
        self._paragraphs = self._shuffled()
        self._facts = [(place, thing) for place in PLACES for thing in THINGS]
        self._chance.shuffle(self._facts)

    def prose(self, num_tokens: int) -> str:
        """About `num_tokens` of paragraphs."""
        return "\n\n".join(self._until(num_tokens, self._paragraphs))

    def sentence(self) -> str:
        """The first sentence of a paragraph."""
        return re.split(r"(?<=[.!?])\s", next(self._paragraphs))[0]

    def fact(self) -> Fact:
        """A fact that no other text of this dealer tells."""
        place, thing = self._facts.pop()
        answer = str(self._chance.randrange(1000, 10_000))
        stem = f"The {thing} of {place} is"
        question = f"What is the {thing} of {place}?"
        return Fact(f"{stem} {answer}.", question, stem, answer)

    def document(self, num_tokens: int, fact: Fact) -> str:
        """Prose with a fact in its middle."""
        paragraphs = self.prose(num_tokens).split("\n\n")
        paragraphs.insert(len(paragraphs) // 2, fact.sentence)
        return "\n\n".join(paragraphs)

    def code(self, num_tokens: int) -> str:
        """Functions and classes of Python's own library, as they stand there."""
        pieces = [piece for name in SOURCES for piece in _definitions(name)]
        self._chance.shuffle(pieces)
        return "\n\n\n".join(self._until(num_tokens, iter(pieces)))

    def tools(self, num_tokens: int) -> str:
        """Functions of Python's own library, described as tools."""
        described = [tool for name in DESCRIBED for tool in _tools(name)]
        self._chance.shuffle(described)
        return "\n".join(self._until(num_tokens, map(json.dumps, described)))

    def _until(self, num_tokens: int, pieces: Iterator[str]) -> list[str]:
        taken: list[str] = []
        while num_tokens > 0:
            taken.append(next(pieces))
            num_tokens -= self._count(taken[-1])
        return taken

    def _shuffled(self) -> Iterator[str]:
        paragraphs = [
            " ".join(paragraph.split())
            for page in topics.values()
            for paragraph in page.split("\n\n")
        ]
        sizes = range(LEAST_WORDS, MOST_WORDS + 1)
        plain = [p for p in paragraphs if len(p.split()) in sizes and "~" not in p]
        self._chance.shuffle(plain)
        return iter(dict.fromkeys(plain))


def _definitions(module: str) -> list[str]:
    source = Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    found = [ast.get_source_segment(source, node) for node in nodes]
    return [text for text in found if text and len(text) < 2500]


def _tools(module: str) -> list[dict[str, Any]]:
    """The public functions of a module, in the form in which models are told of tools."""
    made = []
    for name, function in inspect.getmembers(importlib.import_module(module), inspect.isfunction):
        described = (inspect.getdoc(function) or "").split("\n\n")[0]
        if name.startswith("_") or not described:
            continue
        parameters = {each: {"type": "string"} for each in inspect.signature(function).parameters}
        made.append(
            {
                "name": f"{module.replace('.', '_')}_{name}",
                "description": " ".join(described.split()),
                "parameters": {"type": "object", "properties": parameters},
            }
        )
    return made
