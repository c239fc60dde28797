"""What stays in memory: as much as the budget allows, spread evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.errors import ConfigError
from kvboost.weights.layout import PIECES_IN_BUDGET, PIECES_IN_WINDOW, piece_bytes, plan


def test_everything_stays_if_it_fits() -> None:
    chosen = plan([10, 20, 30], fixed_bytes=40, max_weight_bytes=100)
    assert chosen.resident == {0, 1, 2}
    assert chosen.window_bytes == 0


def test_what_stays_is_spread_evenly() -> None:
    chosen = plan([10] * 100, fixed_bytes=0, max_weight_bytes=400)
    assert chosen.window_bytes == 100
    assert len(chosen.resident) == 30
    gaps = [
        b - a for a, b in zip(sorted(chosen.resident), sorted(chosen.resident)[1:], strict=False)
    ]
    assert set(gaps) <= {3, 4}


def test_a_budget_that_is_too_small_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"max_weight_bytes=100: expected about 240 or more"):
        plan([100, 100], fixed_bytes=40, max_weight_bytes=100)
    with pytest.raises(ConfigError, match="expected about 120 or more"):
        plan([10] * 10, fixed_bytes=90, max_weight_bytes=110)
    plan([10] * 10, fixed_bytes=90, max_weight_bytes=120)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    st.integers(0, 500),
    st.integers(100, 20_000),
)
def test_the_budget_is_never_passed(sizes: list[int], fixed: int, budget: int) -> None:
    try:
        chosen = plan(sizes, fixed, budget)
    except ConfigError:
        assert fixed + 2 * max(sizes) > budget or fixed > 0.74 * budget
        return
    resident = sum(sizes[index] for index in chosen.resident)
    assert fixed + resident + chosen.window_bytes <= budget
    if len(chosen.resident) < len(sizes):
        assert chosen.window_bytes >= 2 * max(sizes)
        left = budget - fixed - resident - chosen.window_bytes
        assert left < 2 * max(sizes)


def test_pieces_are_a_small_part_of_the_window() -> None:
    assert PIECES_IN_WINDOW * piece_bytes(1600) == 400
    assert piece_bytes(1600) == 1600 // PIECES_IN_BUDGET
    assert piece_bytes(3) == 1
