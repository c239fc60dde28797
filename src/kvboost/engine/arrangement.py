"""Arrangement: the order of a prompt's documents that gives it the longest exact prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_TRIED = 64  # prefixes that are looked up


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a prompt: a document, by its number, or text around documents."""

    tokens: list[int]
    document: int | None = None


class Arrangement:
    """Orders documents: those that continue a stored prompt, then other stored ones, then new ones.

    So the prompt has the longest exact prefix, and later prompts with some of its documents may
    share it.
    """

    def __init__(
        self, num_exact: Callable[[list[int]], int], is_stored: Callable[[list[int]], bool]
    ) -> None:
        """`num_exact`: how many first tokens of a prompt are stored as its prefix."""
        self._num_exact, self._is_stored = num_exact, is_stored
        self._num_tried = 0
        self.order: tuple[int, ...] = ()  # of the documents, once arranged

    def __call__(self, pieces: Sequence[Piece]) -> list[int]:
        """The tokens of a prompt with its documents in the chosen order."""
        slots = [place for place, piece in enumerate(pieces) if piece.document is not None]
        documents = [pieces[place] for place in slots]
        texts = [  # before each document, and after the last one
            [token for piece in pieces[start:stop] for token in piece.tokens]
            for start, stop in zip([0, *(s + 1 for s in slots)], [*slots, len(pieces)], strict=True)
        ]
        _, first = self._continued(texts[0], texts[1:], documents)
        rest = [piece for piece in documents if piece not in first]
        stored = [piece for piece in rest if self._is_stored(piece.tokens)]
        arranged = [*first, *stored, *(piece for piece in rest if piece not in stored)]
        self.order = tuple(piece.document for piece in arranged if piece.document is not None)
        tokens = list(texts[0])
        for piece, text in zip(arranged, texts[1:], strict=True):
            tokens += [*piece.tokens, *text]
        return tokens

    def _continued(
        self, before: list[int], texts: Sequence[list[int]], documents: Sequence[Piece]
    ) -> tuple[int, list[Piece]]:
        """How many tokens are stored as a prefix, and the documents in it, in order."""
        most, chosen = len(before), []
        for piece in documents:
            if self._num_tried == MOST_TRIED:
                break
            self._num_tried += 1
            tokens = [*before, *piece.tokens, *texts[0]]
            num, first = self._num_exact(tokens), [piece]
            if num >= len(before) + len(piece.tokens) - 1 and len(documents) > 1:
                others = [each for each in documents if each is not piece]
                further, more = self._continued(tokens, texts[1:], others)
                num, first = max(num, further), [piece, *more]
            if num > most:
                most, chosen = num, first
        return most, chosen
