"""Anchors: the same for a text wherever it stands, few, and quick to find."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.routing import anchors
from kvboost.tiers.anchors import pick


def text(num_bytes: int, seed: int) -> bytes:
    return bytes(random.Random(seed).choices(b"abcdefgh ijklmnop\n", k=num_bytes))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3000), st.integers(0, 1500))
def test_a_part_has_no_anchor_that_the_whole_has_not(seed: int, start: int, length: int) -> None:
    whole = text(3000, seed)
    found = anchors.find(whole[start : start + length]).tolist()
    assert set(found) <= set(anchors.find(whole).tolist())
    assert bool(found) == (len(whole[start : start + length]) >= anchors.SHORTEST)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 200))
def test_overlapping_parts_have_all_anchors_of_the_whole(seed: int, seam: int) -> None:
    whole = text(1200, seed)
    at = 400 + seam
    parts = whole[:at], whole[at - anchors.SHORTEST + 1 :]
    assert {*anchors.find(whole).tolist()} == {
        name for part in parts for name in anchors.find(part).tolist()
    }


def test_there_is_an_anchor_for_about_every_64_bytes() -> None:
    assert 1800 < len(anchors.find(text(131_072, 0))) < 2300


def test_positions_are_those_of_the_named_windows() -> None:
    whole = text(500, 1) + anchors.SEPARATOR + text(500, 2)
    positions, names = anchors.located(whole)
    assert (np.diff(positions) > 0).all()
    by_window: dict[bytes, int] = {}
    for position, name in zip(positions.tolist(), names.tolist(), strict=True):
        window = whole[position : position + anchors.WINDOW_BYTES]
        assert by_window.setdefault(window, name) == name
        assert name in anchors.pick(np.frombuffer(window, np.uint8), 0, len(window), 0)[1]


def test_no_anchor_reaches_over_a_separator() -> None:
    one, other = text(700, 3), text(900, 4)
    joined = one + anchors.SEPARATOR + other
    expected = [*anchors.find(one).tolist(), *anchors.find(other).tolist()]
    assert anchors.find(joined).tolist() == expected
    assert {*expected} < {*anchors.find(one + b"<|end|><|user|>" + other).tolist()}


def test_text_that_repeats_itself_has_few_anchors() -> None:
    assert len(anchors.find(b"=" * 5000)) == 1
    assert len(anchors.find(b"=-" * 5000)) == 1


def test_names_stay_the_same_between_versions() -> None:
    # Routers and replicas are not replaced at the same moment.
    assert anchors.find(bytes(range(200))).tolist() == [55642447476352333, 39856700311488538]


def test_anchors_of_tokens_are_those_that_lie_in_stores() -> None:
    positions, hashes = pick(np.arange(100, dtype=np.uint32), 7)
    assert (positions.tolist(), hashes.tolist()) == ([53], [104619038323698682])
