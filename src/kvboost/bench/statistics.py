"""Ratios of pairs, with an interval that says how far they can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_PAIRS = 6  # below, an interval would only look like one
NUM_SAMPLES = 2000
EDGES = (2.5, 97.5)  # per cent


@dataclass(frozen=True)
class Compared:
    """Two systems that answered the same prompts in the same rounds."""

    system_ms: float
    baseline_ms: float
    ratio: float  # median of the pairs' ratios: a slow minute hits both alike
    low: float | None
    high: float | None
    pairs: int


def compare(pairs: Sequence[tuple[float, float]]) -> Compared:
    """Medians of both sides and of the ratio, with a 95 % bootstrap interval."""
    ratios = np.array([ours / theirs for ours, theirs in pairs])
    low, high = interval(ratios) if len(pairs) >= LEAST_PAIRS else (None, None)
    return Compared(
        system_ms=round(statistics.median(ours for ours, _ in pairs), 2),
        baseline_ms=round(statistics.median(theirs for _, theirs in pairs), 2),
        ratio=round(float(np.median(ratios)), 4),
        low=low,
        high=high,
        pairs=len(pairs),
    )


def interval(
    values: npt.NDArray[np.float64], of: Callable[..., Any] = np.median
) -> tuple[float, float]:
    """Where the median, or another figure, of such values would lie in 95 % of repetitions."""
    drawn = np.random.default_rng(0).choice(values, (NUM_SAMPLES, len(values)))
    low, high = np.percentile(of(drawn, axis=1), EDGES)
    return round(float(low), 4), round(float(high), 4)
