"""How the rows between computed ones are corrected."""

from __future__ import annotations

import numpy as np
import torch

from fakes import GEOMETRY
from kvboost.core import Span
from kvboost.models import spread
from kvboost.models.pool import BlockPool

HOST = torch.device("cpu")


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


def test_patches_of_one_product_correct_as_one_by_one() -> None:
    pool = BlockPool(GEOMETRY, 300, 4, HOST)
    runs, computed = [Span(5, 500), Span(520, 533)], list(range(7, 531, 9))
    places, chance = np.random.default_rng(0).permutation(1200)[:540], torch.Generator()
    chance.manual_seed(1)
    made = spread.patches(runs, computed, torch.float32, HOST)
    for layer, planes in pool.layers.items():
        for plane in planes:
            plane[:, :, :1200] = torch.randn(plane[:, :, :1200].shape, generator=chance)
        before = [plane.clone() for plane in planes]
        fresh = [torch.randn(1, p.shape[1], len(computed), p.shape[3]) for p in planes]
        for group in spread.padded(made, places, pool):
            group.apply(layer, (fresh[0], fresh[1]))
        for plane, old, new in zip(planes, before, fresh, strict=True):
            rows = old[:, :, places]
            for patch in made:
                spread.apply(patch, rows[:, :, patch.start : patch.stop], new)
            old[:, :, places] = rows
            torch.testing.assert_close(plane, old)
            assert not plane[:, :, pool.blank].any()


def test_an_overflow_in_one_patch_stays_there() -> None:
    pool, places = BlockPool(GEOMETRY, 300, 4, HOST), np.arange(540)
    computed = [*range(0, 380, 9), *range(500, 540, 20)]
    made = spread.patches([Span(0, 384), Span(500, 540)], computed, torch.float32, HOST)
    fresh = [torch.ones(1, p.shape[1], len(computed), p.shape[3]) for p in pool.layers[0]]
    fresh[0][:, :, 0] = torch.inf
    for group in spread.padded(made, places, pool):
        group.apply(0, (fresh[0], fresh[1]))
    key = pool.layers[0][0]
    assert not key[:, :, :384].isfinite().all() and key[:, :, 500:540].isfinite().all()
    assert not key[:, :, pool.blank].any()
