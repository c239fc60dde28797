"""How the rows between computed ones are corrected."""

from __future__ import annotations

import torch

from kvboost.core import Span
from kvboost.models import spread


def correct(change: torch.Tensor, computed: list[int], runs: list[Span]) -> torch.Tensor:
    """What is left of `change` [rows, dim], which the fresh rows show, after the correction."""
    stored = torch.zeros(1, 1, *change.shape)
    fresh = change[computed][None, None]
    for patch in spread.patches(runs, computed, torch.float32, torch.device("cpu")):
        spread.apply(patch, stored[:, :, patch.start : patch.stop], fresh)
    stored[0, 0, computed] = change[computed]
    return change - stored[0, 0]


def smooth(num_rows: int, seed: int) -> torch.Tensor:
    """A change that wanders slowly along the text."""
    steps = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed))
    return 1.0 + 0.05 * steps.cumsum(0)


def test_a_change_that_all_rows_share_is_mostly_taken_back() -> None:
    change, computed = smooth(300, 0), list(range(0, 300, 16))
    left = correct(change, computed, [Span(0, 300)])
    assert float(left.norm() / change.norm()) < 0.4


def test_runs_do_not_speak_for_each_other() -> None:
    change = smooth(200, 1)
    left = correct(change, list(range(0, 100, 10)), [Span(0, 100), Span(100, 200)])
    assert torch.equal(left[100:], change[100:])
    assert float(left[:100].norm() / change[:100].norm()) < 0.4


def test_rows_outside_of_runs_are_left_alone() -> None:
    change, computed = smooth(100, 2), [5, 20, 40, 95]
    left = correct(change, computed, [Span(10, 50)])
    outside = [p for p in range(100) if not 10 <= p < 50 and p not in computed]
    assert torch.equal(left[outside], change[outside])


def test_noise_is_not_spread() -> None:
    change = torch.randn(400, 8, generator=torch.Generator().manual_seed(3))
    left = correct(change, list(range(0, 400, 16)), [Span(0, 400)])
    assert float(left.norm() / change.norm()) < 1.1


def test_long_runs_are_corrected_in_pieces_of_bounded_size() -> None:
    made = spread.patches(
        [Span(3, 5003)], list(range(3, 5003, 20)), torch.float32, torch.device("cpu")
    )
    assert [patch.start for patch in made[1:]] == [patch.stop for patch in made[:-1]]
    assert (made[0].start, made[-1].stop) == (3, 5003)
    assert max(patch.stop - patch.start for patch in made) <= spread.LONGEST_PATCH
