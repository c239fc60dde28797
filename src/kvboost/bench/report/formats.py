"""Numbers as the report writes them."""

from typing import Any

from kvboost.bench.report.reading import Measure

NONE = "\N{EN DASH}"


def ms(value: float | None) -> str:
    """Write milliseconds without their unit."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def times(value: float | None) -> str:
    """Write a ratio."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Write a share of one as percent."""
    return NONE if value is None else f"{100 * value:.1f}%"


def nats(value: float | None) -> str:
    """Write a distance of distributions."""
    return NONE if value is None else f"{value:.3f}"


def between(low: float | None, high: float | None) -> str:
    """Write an interval."""
    return NONE if low is None or high is None else f"{times(low)} to {times(high)}"


def spread(values: list[float]) -> str:
    """Write the least and the greatest of ratios, or the one where they are written alike."""
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low} to {high}"


def counted(number: int, noun: str) -> str:
    """Write how many there are of something."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def with_interval(measure: Measure | None) -> str:
    """Write the ratio of a measure and its interval."""
    if measure is None:
        return NONE
    if measure.low is None or measure.high is None:
        return times(measure.ratio)
    return f"{times(measure.ratio)} ({between(measure.low, measure.high)})"


def plain(value: Any) -> str:
    """Write a value of unknown kind."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def joined(words: list[str]) -> str:
    """Write words as a list in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
