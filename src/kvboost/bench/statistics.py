"""Ratios of pairs, with an interval that says how far they can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_PAIRS = 6  # below, an interval would only look like one
NUM_SAMPLES = 2000
EDGES = (2.5, 97.5)  # per cent


def compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians of both sides and of the pairs' ratios, with a 95 % bootstrap interval.

    A slow minute hits both of a pair alike, so the ratio is not that of the medians.
    """
    ours, theirs = np.array(pairs).T
    ratios = ours / theirs
    low, high = interval(ratios) if len(pairs) >= LEAST_PAIRS else (None, None)
    return {
        "system_ms": round(float(np.median(ours)), 2),
        "baseline_ms": round(float(np.median(theirs)), 2),
        "ratio": round(float(np.median(ratios)), 4),
        "low": low,
        "high": high,
        "pairs": len(pairs),
    }


def interval(
    values: npt.NDArray[np.float64], of: Callable[..., Any] = np.median
) -> tuple[float, float]:
    """Where the median, or another figure, of such values would lie in 95 % of repetitions."""
    drawn = np.random.default_rng(0).choice(values, (NUM_SAMPLES, len(values)))
    low, high = np.percentile(of(drawn, axis=1), EDGES)
    return round(float(low), 4), round(float(high), 4)
