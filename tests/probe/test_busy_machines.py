"""On a busy machine answers are late at any moment, and a slow server is asked little: no alarm."""

from typing import cast

import pytest

from kvboost.probe import run
from kvboost.probe.client import Reply, Server
from kvboost.probe.fast import Fast, Pair
from kvboost.probe.texts import Texts
from probe.engine import Engine, serving

FACTS = [(1.0, 0.3)] * 8  # times of prompts about facts, new and repeated


def measured(*longest: tuple[float, float], cached: int = 0) -> Fast:
    """Times of the longest prompts, new and repeated, and of shorter ones, which are hits."""
    texts = Texts("a")

    def pair(num_words: int, new_s: float, again_s: float) -> Pair:
        new, again = (Reply("", s, 1000, n, None) for s, n in ((new_s, 0), (again_s, cached)))
        return Pair(texts.document(num_words), new, again)

    pairs = {800: [pair(800, *each) for each in longest], 200: [pair(200, 0.3, 0.1)]}
    return Fast(cast("Server", None), texts, pairs)


def test_a_late_hit_among_many_fast_ones_is_no_lack_of_a_cache() -> None:
    for late, others in ((measured((1.0, 2.2)), FACTS), (measured((1.0, 2.2), cached=900), ())):
        light = {each.name: each.light for each in late.findings(others)}
        assert light["hits"] == "grey"


def test_a_server_without_a_cache_is_told_by_a_single_pair() -> None:
    light = {each.name: each.light for each in measured((1.0, 1.0)).findings([(1.0, 1.0)] * 8)}
    assert light["hits"] == "yellow"


@pytest.mark.parametrize(("times", "cached"), [((1.0, 0.95), 900), ((3.0, 1.0), 0)])
def test_usage_is_not_called_wrong_by_fewer_than_three_times(
    times: tuple[float, float], cached: int
) -> None:
    for num_pairs, light in ((1, "green"), (2, "green"), (3, "red")):
        found = measured(*[times] * num_pairs, cached=cached).findings()
        assert {each.name: each.light for each in found}["usage"] == light


@pytest.mark.parametrize("seed", range(3))
def test_stalls_raise_no_alarm(seed: int) -> None:
    with serving(Engine(jitter=0.5, stalls=0.1, seed=seed)) as url:
        report = run(url, salt=True)
    assert not [each for each in report.findings if each.light in ("red", "yellow")]
