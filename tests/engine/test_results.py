"""Results as text."""

from __future__ import annotations

import pytest

from kvboost import GenerationResult, ReuseReport
from kvboost.core import MatchKind, Span, percent
from kvboost.engine.results import SpanReport


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1921, 1930, "99%"),
        (9, 1930, "1%"),
        (1, 3, "33%"),
        (2, 3, "67%"),
        (0.995, 1, "99%"),
        (0, 0, "0%"),
    ],
)
def test_a_share_is_all_or_nothing_only_if_it_is(part: float, whole: float, text: str) -> None:
    assert percent(part, whole) == text


def result(text: str, num_new: int) -> GenerationResult:
    return GenerationResult(
        output_text=text,
        token_ids=list(range(num_new)),
        finish_reason="stop",
        ttft_ms=31.4,
        total_ms=200.0,
        prompt_tokens=1930,
        cached_tokens=1921,
        reuse=ReuseReport(()),
        output_texts=[text],
        output=None,
    )


def test_a_result_prints_its_text_and_a_line_of_figures() -> None:
    figures = "99% of 1930 prompt tokens reused; 1 token in 200 ms, the first after 31 ms; "
    assert str(result(" Paris", 1)) == f"Paris\n{figures}ended by stop"
    assert repr(result(" Paris", 1)) == f"GenerationResult('Paris', {figures}ended by stop)"


def test_a_long_text_is_cut_to_one_line() -> None:
    long = result("one\n\ntwo " * 500, 900)
    assert str(long).startswith("one two one") and str(long).count("\n") == 1
    assert len(str(long)) < 200 and "..." in str(long)
    assert len(repr(long)) < 220 and "\n" not in repr(long)


def test_one_token_is_not_one_tokens() -> None:
    spans = (SpanReport(Span(0, 1), MatchKind.EXACT), SpanReport(Span(1, 4), MatchKind.MISS))
    assert str(ReuseReport(spans)).startswith("1 token exact, 0 moved")
