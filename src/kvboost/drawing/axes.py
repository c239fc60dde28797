"""Axes of drawings: where a value lies, and at which values the marks are."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_NICE = (1.0, 2.0, 5.0)
_LEAST_LOG_SPAN = 1.8


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        """Return the pixel of a value; what is beyond the axis lies at its end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def tick_choices(self) -> list[list[float]]:
        """Return values that could have a mark: many, fewer, and so on."""
        if self.is_log:
            return [_log_ticks(self.low, self.high, nice) for nice in (_NICE, (1.0, 3.0), (1.0,))]
        step = _step(self.high - self.low)
        return [_ticks(self.low, self.high, factor * step) for factor in (1, 2, 4)]


def fitted(
    values: Iterable[float], start: float, end: float, *, is_log: bool, from_zero: bool = False
) -> Axis:
    """Return an axis on which all values lie, with round ends.

    A logarithmic axis over values that are close together becomes a linear one.
    """
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)] or [1.0]
    low, high = min(kept), max(kept)
    if is_log and high / low >= _LEAST_LOG_SPAN:
        return Axis(_round_down(low), _round_up(high), start, end, is_log=True)
    low = min(low, 0.0) if from_zero else low
    if high <= low:
        low, high = low - abs(low) * 0.1 - 0.01, high + abs(high) * 0.1 + 0.01
    step = _step(high - low)
    return Axis(
        math.floor(low / step + 1e-9) * step,
        math.ceil(high / step - 1e-9) * step,
        start,
        end,
        is_log=False,
    )


def label(value: float) -> str:
    """Write a tick's value."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _step(span: float) -> float:
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min(
        (m for m in (1.0, 2.0, 2.5, 5.0, 10.0)), key=lambda m: abs(m - rough / power)
    )


def _ticks(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, nice: tuple[float, ...]) -> list[float]:
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    values = [n * 10.0**p for p in powers for n in nice]
    return [v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(n * power for n in _NICE if n * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(n * power for n in (*_NICE, 10.0) if n * power >= value * (1 - 1e-9))
