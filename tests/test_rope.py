import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import Rotation
from kvboost.rope import rotate

ROTATIONS = [
    Rotation((1.0, 0.1, 0.01), offset, layout)
    for offset in (0, 2)
    for layout in ("half", "interleaved")
]
DELTA = st.integers(-5000, 5000)


@given(st.sampled_from(ROTATIONS), DELTA, DELTA)
def test_two_moves_are_one(rotation: Rotation, first: int, second: int) -> None:
    k = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    twice = rotate(rotate(k, rotation, first), rotation, second)
    assert torch.allclose(twice, rotate(k, rotation, first + second), atol=1e-5)


def test_moving_nowhere_changes_no_bit() -> None:
    k = torch.randn(4, 8).bfloat16()
    assert rotate(k, ROTATIONS[0], 0) is k


def test_dims_outside_the_rotation_stay() -> None:
    k = torch.randn(4, 8)
    moved = rotate(k, Rotation((1.0, 0.1), 2, "half"), 3)
    assert torch.equal(moved[:, :2], k[:, :2]) and torch.equal(moved[:, 6:], k[:, 6:])
    assert not torch.equal(moved[:, 2:6], k[:, 2:6])
