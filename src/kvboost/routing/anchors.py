"""Anchors: hashes of bits of a text, by which its parts are found again at any position.

Of bytes and not of tokens, so that a router needs no tokenizer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost.tiers.anchors import pick

WINDOW_BYTES = 32
STRETCH_LOG2 = 7  # an anchor for about every 64 bytes, which are 16 tokens of English
SHORTEST = WINDOW_BYTES + 2**STRETCH_LOG2 - 1
"""A text of fewer bytes has no anchor: which one it keeps would depend on where it ends."""

SEPARATOR = b"\xff\xff\xff\xff"
"""Ends a text within a text; neither in UTF-8 nor in token ids.

No anchor reaches over it. A prompt's messages are apart in a request, and stand in what an engine
holds with marks between them that a router does not know.
"""


def find(text: bytes) -> npt.NDArray[np.uint64]:
    """A text's anchors in order; those of a part are among those of the whole."""
    return located(text)[1]


def located(text: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Where the anchors of a text begin, and the anchors."""
    positions = [np.empty(0, np.int64)]
    names = [np.empty(0, np.uint64)]
    start = 0
    for part in text.split(SEPARATOR):
        if len(part) >= SHORTEST:
            kept, hashes = pick(np.frombuffer(part, np.uint8), 0, WINDOW_BYTES, STRETCH_LOG2)
            # Text that repeats itself keeps an anchor at each turn, all of one name: one will do.
            is_new = np.ones(len(kept), np.bool_)
            is_new[1:] = hashes[1:] != hashes[:-1]
            positions.append(kept[is_new] + start)
            names.append(hashes[is_new])
        start += len(part) + len(SEPARATOR)
    return np.concatenate(positions), np.concatenate(names)
