"""The cost model: predicts prefill times from earlier ones, to skip reuse that would not pay."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_REMEMBERED = 128
RECENT = 0.97  # weight of an observation against the next one: the machine may change its pace

# A plan with moved text must win by this much: it gives up exactness and predictions err.
MOVED_GAIN = 0.8

# How little is believed of each feature before it is seen: rows explain most of any prefill.
DOUBTS = np.array([1e-2, 1e-2, 1e-4, 1e-3, 1e-2])
ROWS, PLACED = 2, 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a prefill does: rows that it computes, pairs of query and key, rows that it places."""

    num_rows: int
    num_pairs: int
    num_placed: int = 0

    @classmethod
    def of(cls, num_tokens: int, num_rows: int, num_placed: int) -> Work:
        """Work of computing `num_rows` of `num_tokens` positions on top of the placed ones."""
        is_fresh = num_placed == 0
        pairs = num_tokens * num_tokens // 2 if is_fresh else num_rows * num_tokens
        return cls(num_rows, pairs, num_placed)


class CostModel:
    """Seconds as a sum over a start, rows, pairs and placed rows, fitted to relative error.

    Thread-safe: requests that load ask while another one is computed.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[Work, float]] = deque(maxlen=NUM_REMEMBERED)
        self._fitted: npt.NDArray[np.float64] | None = None
        self._lock = threading.Lock()

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a prefill that took `seconds`."""
        with self._lock:
            self._seen.append((work, seconds))
            self._fitted = None

    def predict(self, work: Work) -> float | None:
        """Seconds that `work` will take; None before anything was seen."""
        with self._lock:
            if not self._seen:
                return None
            if self._fitted is None:
                self._fitted = _fit(self._seen)
            return float(_features(work) @ self._fitted)

    def pays(self, work: Work, instead_of: Work, gain: float) -> bool:
        """Whether `work` is expected to take less than `gain` of the time of the other."""
        ours, theirs = self.predict(work), self.predict(instead_of)
        return ours is None or theirs is None or ours < gain * theirs


def _features(work: Work) -> npt.NDArray[np.float64]:
    is_sparse = float(work.num_placed > 0)
    return np.array([1.0, is_sparse, work.num_rows, work.num_pairs, work.num_placed])


def _fit(seen: deque[tuple[Work, float]]) -> npt.NDArray[np.float64]:
    """Least squares of the relative error, without negative coefficients."""
    seconds = np.array([each for _, each in seen])
    rows = np.array([_features(work) for work, _ in seen])
    weights = RECENT ** np.arange(len(seen))[::-1]
    scale = rows.max(axis=0).clip(1.0)
    # A few placed rows beside a slow start must not make placing many look expensive.
    scale[PLACED] = max(scale[PLACED], scale[ROWS])
    left = (rows / scale) / seconds[:, None] * seconds.mean() * weights[:, None]
    used = list(range(left.shape[1]))
    solved = np.zeros(left.shape[1])
    while used:
        part = left[:, used]
        answer = np.linalg.solve(part.T @ part + np.diag(DOUBTS[used]), part.T @ weights)
        if (answer >= 0).all():
            solved[used] = answer
            break
        used.pop(int(answer.argmin()))
    fitted: npt.NDArray[np.float64] = solved * seconds.mean() / scale
    return fitted
