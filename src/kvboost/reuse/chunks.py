"""tokens -> chunks. Knows sizes and boundary tokens; knows no model, key or tier."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from kvboost.core import TOKEN_BYTES, Chunk, Span


def split(
    tokens: Sequence[int], chunk_size: int, window: int = 0, boundaries: Set[int] = frozenset()
) -> list[Chunk]:
    """Cut `tokens` into chunks of at most `chunk_size`; only the last may be shorter on a grid.

    With a `window`, a chunk ends at the first boundary token (the end of a line or sentence) among
    its last `window` places. A cut depends on the tokens before it alone, so a common prefix is
    cut alike in every prompt.
    """
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    chunks, start = [], 0
    while start < len(tokens):
        stop = min(start + chunk_size, len(tokens))
        for cut in range(max(start + 1, start + chunk_size - window), stop):
            if tokens[cut - 1] in boundaries:
                stop = cut
                break
        chunks.append(Chunk(Span(start, stop), packed[start * TOKEN_BYTES : stop * TOKEN_BYTES]))
        start = stop
    return chunks
