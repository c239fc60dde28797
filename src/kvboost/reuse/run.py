"""K/V in its slots + live positions -> all K/V, through the model's one sparse prefill."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from kvboost.core import Span

if TYPE_CHECKING:
    from kvboost.models.base import CausalModel, Slots


def forward(
    model: CausalModel,
    slots: Slots,
    tokens: Sequence[int],
    live: Sequence[Span],
    repaired: Sequence[int] = (),
    piece_tokens: int | None = None,
) -> Sequence[int]:
    """Compute all of `live` and `repaired` but the last piece; return the positions of that piece.

    The last piece is left to the first step of decoding, which wants its logits. Without
    `piece_tokens` everything is one piece. With it, pieces end on its multiples, whatever was
    reused before them: the last bits of a matrix product depend on its shape, so equal shapes
    make equal bits.
    """
    pieces = _cut(live, repaired, piece_tokens)
    for piece in pieces[:-1]:
        model.forward(slots, [tokens[position] for position in piece], piece)
    return pieces[-1]


def _cut(
    live: Sequence[Span], repaired: Sequence[int], piece_tokens: int | None
) -> list[Sequence[int]]:
    if piece_tokens is None:
        positions = [range(span.start, span.stop) for span in live]
        if len(positions) == 1 and not repaired:
            return [positions[0]]
        return [sorted(chain(repaired, *positions))]
    pieces: list[Sequence[int]] = []
    for span in live:
        first = span.start // piece_tokens * piece_tokens + piece_tokens
        borders = [span.start, *range(first, span.stop, piece_tokens), span.stop]
        pieces += [range(start, stop) for start, stop in pairwise(borders)]
    return pieces
