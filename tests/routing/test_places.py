"""Names of places: the same for a text wherever it stands, few, and quick to find."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.routing import places
from kvboost.tiers import anchors


def text(num_bytes: int, seed: int) -> bytes:
    return bytes(random.Random(seed).choices(b"abcdefgh ijklmnop\n", k=num_bytes))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3000), st.integers(0, 1500))
def test_a_part_has_no_place_that_the_whole_has_not(seed: int, start: int, length: int) -> None:
    whole = text(3000, seed)
    found = places.find(whole[start : start + length]).tolist()
    assert set(found) <= set(places.find(whole).tolist())
    assert bool(found) == (len(whole[start : start + length]) >= places.SHORTEST)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 200))
def test_overlapping_parts_have_all_places_of_the_whole(seed: int, seam: int) -> None:
    whole = text(1200, seed)
    at = 400 + seam
    parts = whole[:at], whole[at - places.SHORTEST + 1 :]
    assert {*places.find(whole).tolist()} == {
        name for part in parts for name in places.find(part).tolist()
    }


def test_there_is_a_place_for_about_every_64_bytes() -> None:
    assert 1800 < len(places.find(text(131_072, 0))) < 2300


def test_positions_are_those_of_the_named_windows() -> None:
    whole = text(500, 1) + places.SEPARATOR + text(500, 2)
    positions, names = places.located(whole)
    assert (np.diff(positions) > 0).all()
    by_window: dict[bytes, int] = {}
    for position, name in zip(positions.tolist(), names.tolist(), strict=True):
        window = whole[position : position + places.WINDOW_BYTES]
        assert by_window.setdefault(window, name) == name
        assert name in anchors.pick(np.frombuffer(window, np.uint8), 0, len(window), 0)[1]


def test_no_place_reaches_over_a_separator() -> None:
    one, other = text(700, 3), text(900, 4)
    joined = one + places.SEPARATOR + other
    expected = [*places.find(one).tolist(), *places.find(other).tolist()]
    assert places.find(joined).tolist() == expected
    assert {*expected} < {*places.find(one + b"<|end|><|user|>" + other).tolist()}


def test_text_that_repeats_itself_has_few_places() -> None:
    assert len(places.find(b"=" * 5000)) == 1
    assert len(places.find(b"=-" * 5000)) == 1


def test_names_stay_the_same_between_versions() -> None:
    # Routers and replicas are not replaced at the same moment.
    assert places.find(bytes(range(200))).tolist() == [55642447476352333, 39856700311488538]


def test_anchors_of_tokens_are_those_that_lie_in_stores() -> None:
    positions, hashes = anchors.pick(np.arange(100, dtype=np.uint32), 7)
    assert (positions.tolist(), hashes.tolist()) == ([53], [104619038323698682])
