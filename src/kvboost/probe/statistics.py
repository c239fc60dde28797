"""The few tests that verdicts rest on, exact where samples are small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Separation:
    """How well two kinds of times can be told apart."""

    auc: float  # 0.5: not at all; 1: always
    low: float
    high: float
    p: float  # of such an AUC or a larger one by chance


def separation(smaller: Sequence[float], larger: Sequence[float]) -> Separation:
    """How often a value of the first kind is below one of the second.

    The probability is exact (Mann and Whitney), the interval Hanley and McNeil's.
    """
    pairs = list(product(smaller, larger))
    wins = sum((a < b) + (a == b) / 2 for a, b in pairs)
    n, m = len(smaller), len(larger)
    auc = wins / len(pairs)
    least = 0.5 / max(n, m)
    a = min(max(auc, least), 1 - least)
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    spread = a * (1 - a) + (n - 1) * (q1 - a * a) + (m - 1) * (q2 - a * a)
    error = Z * math.sqrt(spread / (n * m))
    return Separation(auc, max(0.0, a - error), min(1.0, a + error), _rank_p(wins, n, m))


def _rank_p(wins: float, n: int, m: int) -> float:
    """Chance of at least so many wins among n * m pairs if both kinds are the same."""
    ways = [1] + [0] * (n * m)  # of each number of wins, by adding a smaller value at a time
    for rank in range(1, n + 1):
        for at in range(n * m, m + rank - 1, -1):
            ways[at] -= ways[at - m - rank]
        for at in range(rank, n * m + 1):
            ways[at] += ways[at - rank]
    num_at_least: int = sum(ways[math.ceil(wins) :])
    return num_at_least / math.comb(n + m, n)


def sign_p(num_true: int, num_all: int) -> float:
    """Chance of at least so many heads."""
    num_ways: int = sum(math.comb(num_all, k) for k in range(num_true, num_all + 1))
    return num_ways / 2.0**num_all


def more_p(hits: int, tries: int, base_hits: int, base_tries: int) -> float:
    """Chance of so large a share beside the base's, if both are the same (Fisher)."""
    total, all_hits = tries + base_tries, hits + base_hits
    most = min(tries, all_hits)
    ways = (
        math.comb(tries, k) * math.comb(base_tries, all_hits - k) for k in range(hits, most + 1)
    )
    return sum(ways) / math.comb(total, all_hits)
