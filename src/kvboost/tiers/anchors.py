"""Anchors: hashes by which a text is found again at any position (winnowing).

Every window of tokens is hashed, and of each stretch of windows the smallest hash is kept. Which
windows are kept depends on the tokens around them alone, so a text keeps the same ones in every
prompt, and any `SHORTEST_FOUND` equal tokens have one of them in common.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost.core import Namespace

WINDOW = 16  # tokens that are hashed together
STRETCH_LOG2 = 6  # of 64 windows one is kept: about four in a chunk of 128 tokens
SHORTEST_FOUND = WINDOW + 2**STRETCH_LOG2 - 1

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 2**64)
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the constants of splitmix64


def salt(space: Namespace) -> int:
    """A salt that separates the hashes of one namespace from those of others."""
    owner, model = space[:8], space[-8:]
    return int.from_bytes(owner, "little") ^ int.from_bytes(model, "little")


def pick(
    tokens: npt.NDArray[np.uint32] | npt.NDArray[np.uint8],
    salted: int,
    window: int = WINDOW,
    stretch_log2: int = STRETCH_LOG2,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Offsets of the kept windows of a text, and their hashes. Other salts give other hashes."""
    if len(tokens) < window:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    hashes = _window_hashes(tokens, salted, window)
    stretch = min(2**stretch_log2, 2 ** (len(hashes).bit_length() - 1))
    least = _sliding(np.minimum, hashes, stretch)
    # A window is kept if it is the least of any stretch that it is part of.
    padding = np.zeros(stretch - 1, np.uint64)
    highest = _sliding(np.maximum, np.concatenate([padding, least, padding]), stretch)
    kept = np.flatnonzero(hashes == highest)
    return kept, hashes[kept]


def _window_hashes(
    tokens: npt.NDArray[np.uint32] | npt.NDArray[np.uint8], salted: int, window: int
) -> npt.NDArray[np.uint64]:
    """One well-mixed hash for each window of `window` tokens."""
    powers, inverses = _powers(len(tokens))
    total = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, out=total[1:])
    count = len(tokens) - window + 1
    hashes = (total[window:] - total[:count]) * inverses[:count] + np.uint64(salted)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(_MIX[0])
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(_MIX[1])
    mixed: npt.NDArray[np.uint64] = hashes ^ (hashes >> np.uint64(31))
    return np.maximum(mixed, np.uint64(2))


_known_powers = (np.ones(1, np.uint64), np.ones(1, np.uint64))


def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The first `count` powers of the base and of its inverse."""
    global _known_powers
    known = _known_powers  # another thread may put shorter ones in their place
    if len(known[0]) < count:
        size = 2 ** count.bit_length()
        grown = []
        for factor in (_BASE, _INVERSE):
            steps = np.full(size, factor, np.uint64)
            steps[0] = 1
            grown.append(np.cumprod(steps, dtype=np.uint64))
        _known_powers = known = (grown[0], grown[1])
    return known[0][:count], known[1][:count]


def _sliding(
    pick_of_two: np.ufunc, values: npt.NDArray[np.uint64], width: int
) -> npt.NDArray[np.uint64]:
    """Least or highest of every `width` neighbours, a power of two, in log2(width) passes."""
    step = 1
    while step < width:
        values = pick_of_two(values[:-step], values[step:])
        step *= 2
    return values
