"""Tokens at random: their shares, their limits, and what a seed means."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kvboost.core import Sampling
from kvboost.models.sampling import MOST_RANKED, Chooser, choose

SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def drawn(logits: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    chooser = Chooser(sampling, [0])
    return [choose([logits.clone()], [chooser])[0].token for _ in range(count)]


@pytest.mark.parametrize(
    ("rules", "shares"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.0}, [0, 1, 0, 0]),
        ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),  # top_p of what top_k leaves: 4 of 7
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e-300}, [0, 1, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(rules: dict, shares: list[float]) -> None:
    count = 4000
    tokens = Counter(
        drawn(SHARES.log(), Sampling(**{"temperature": 1.0, "seed": 1} | rules), count)
    )
    for token, share in enumerate(shares):
        tolerance = 5 * math.sqrt(count * share * (1 - share))  # five standard deviations
        assert abs(tokens[token] - count * share) <= tolerance


def test_a_flat_distribution_is_not_cut_where_sorting_began() -> None:
    size = 4 * MOST_RANKED
    rules = Sampling(temperature=1.0, top_p=0.75, seed=3)
    logits = torch.linspace(1e-3, 0, size)  # nearly flat, the likeliest first
    tokens = drawn(logits, rules, 300)
    assert max(tokens) > MOST_RANKED
    assert max(tokens) <= 0.75 * size


@pytest.mark.parametrize("rules", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_seed_means_the_same_beside_others(rules: dict) -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    own = Sampling(**{"temperature": 1.0, "seed": 7} | rules)
    others = (Sampling(temperature=1.0, top_k=3), own, Sampling(temperature=2.0, top_p=0.5))
    choosers = [Chooser(each, [0]) for each in others]
    beside = [choose(list(rows), choosers)[1].token for _ in range(20)]
    assert beside == drawn(rows[1], own, 20)


def test_a_seed_means_the_same_beside_others_where_logits_are_equal() -> None:
    rows = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    own = Sampling(temperature=1.0, top_k=50, seed=7)
    choosers = [Chooser(Sampling(temperature=1.0, top_p=0.9), [0]), Chooser(own, [0])]
    beside = [choose(list(rows), choosers)[1].token for _ in range(20)]
    assert beside == drawn(rows[1], own, 20)


def test_a_prompt_token_without_a_logit_is_an_error_of_its_request_alone() -> None:
    rows = torch.arange(20.0).view(2, 10)
    choosers = [Chooser(Sampling(repetition_penalty=2.0), [12]), Chooser(Sampling(), [])]
    error, choice = choose(list(rows), choosers)
    assert isinstance(error, IndexError) and choice.token == 9
