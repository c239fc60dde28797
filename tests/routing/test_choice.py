"""The choice of a replica."""

from __future__ import annotations

import random

from kvboost.routing.choice import Policy, rank, two_choices

POLICY = Policy(least_share=0.2, slack=3)


def test_who_holds_most_comes_first() -> None:
    loads = {"a": 0, "b": 0, "c": 0}
    assert rank({"a": 0.3, "b": 0.9, "c": 0.5}, loads, POLICY) == ["b", "c", "a"]


def test_little_held_is_no_reason() -> None:
    assert rank({"a": 0.19, "b": 0.2}, {"a": 0, "b": 0}, POLICY) == ["b"]
    assert rank({}, {"a": 0}, POLICY) == []


def test_a_long_queue_outweighs_what_is_held() -> None:
    assert rank({"a": 1.0}, {"a": 4, "b": 1}, POLICY) == ["a"]
    assert rank({"a": 1.0}, {"a": 5, "b": 1}, POLICY) == []
    assert rank({"a": 1.0}, {"a": 90, "b": 88}, POLICY) == ["a"]


def test_what_is_held_is_worth_a_queue_in_proportion() -> None:
    assert rank({"a": 0.34}, {"a": 1, "b": 0}, POLICY) == ["a"]
    assert rank({"a": 0.32}, {"a": 1, "b": 0}, POLICY) == []  # what all prompts have, say


def test_of_equal_ones_the_first_is_preferred() -> None:
    shares = {"a": 0.5, "b": 0.5}
    assert rank(shares, {"b": 1, "a": 1}, POLICY) == ["b", "a"]
    assert rank(shares, {"a": 1, "b": 1}, POLICY) == ["a", "b"]


def test_who_cannot_be_chosen_is_not_preferred() -> None:
    assert rank({"gone": 1.0, "a": 0.5}, {"a": 0}, POLICY) == ["a"]
    assert rank({"gone": 1.0}, {}, POLICY) == []


def test_of_nearly_equal_ones_the_shorter_queue_wins() -> None:
    assert rank({"a": 0.99, "b": 0.97}, {"a": 2, "b": 1}, POLICY) == ["b", "a"]


def test_of_two_drawn_the_shorter_queue_is_taken() -> None:
    loads = {str(number): number for number in range(10)}
    chance = random.Random(0)
    counts = [0] * 10
    for _ in range(4500):
        counts[int(two_choices(loads, chance))] += 1
    assert counts[9] == 0  # the longest of all wins against none
    assert all(abs(count - 100 * (9 - number)) < 110 for number, count in enumerate(counts))


def test_one_replica_is_always_the_choice() -> None:
    assert two_choices({"only": 7}, random.Random(0)) == "only"
