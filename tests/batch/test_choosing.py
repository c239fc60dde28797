"""Logits -> tokens: the rules are Transformers' and OpenAI's, the dice are each request's own."""

from __future__ import annotations

import math
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvboost.core import Sampling
from kvboost.errors import ConfigError
from kvboost.models.sampling import MOST_RANKED, Choice, Chooser, adjust, choose

SIZE = 40


def logits_of(seed: int, size: int = SIZE) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def chosen(logits: list[torch.Tensor], choosers: list[Chooser]) -> list[Choice]:
    choices = choose(logits, choosers)
    assert not any(isinstance(choice, Exception) for choice in choices)
    return choices


def each_face(weights: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Dice that show another one of the faces that they have for each row."""
    possible = [row.nonzero()[:, 0].tolist() for row in weights]
    return torch.tensor([faces[rank % len(faces)] for rank, faces in enumerate(possible)])


def allowed(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    choosers = [Chooser(sampling, []) for _ in logits]
    with patch("kvboost.models.sampling.pick", each_face):
        return {choice.token for choice in chosen([logits] * len(logits), choosers)}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 5, 39, 40, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(seed)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = warpers(None, logits[None].clone())[0]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert allowed(logits, sampling) == set(scores.isfinite().nonzero()[:, 0].tolist())


def drawn(logits: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    chooser = Chooser(sampling, [])
    return [chosen([logits], [chooser])[0].token for _ in range(count)]


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
    ],
)
def test_tokens_come_as_often_as_they_should(rules: dict, shares: list[float]) -> None:
    count, logits = 4000, torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    tokens = Counter(drawn(logits, Sampling(**{"temperature": 1.0, "seed": 1} | rules), count))
    for token, share in enumerate(shares):
        tolerance = 5 * math.sqrt(count * share * (1 - share))  # five standard deviations
        assert abs(tokens[token] - count * share) <= tolerance


def test_a_flat_distribution_is_not_cut_where_sorting_began() -> None:
    size = 4 * MOST_RANKED
    logits = torch.linspace(1e-3, 0, size)  # nearly flat, the likeliest first
    tokens = drawn(logits, Sampling(temperature=1.0, top_p=0.75, seed=3), 300)
    assert MOST_RANKED < max(tokens) <= 0.75 * size


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-50, 1e-300])
def test_without_temperature_the_likeliest_token_is_taken(temperature: float) -> None:
    for seed in range(5):
        chooser = Chooser(Sampling(temperature=temperature), [])
        assert chosen([logits_of(seed)], [chooser])[0].token == int(logits_of(seed).argmax())


def test_a_seed_means_the_same_alone_and_beside_any_others() -> None:
    def answer(others: list[Sampling], sampling: Sampling) -> list[int]:
        choosers = [Chooser(each, []) for each in [*others, sampling]]
        tokens = []
        for step in range(12):
            rows = [logits_of(100 * place + step) for place in range(len(others))]
            tokens.append(chosen([*rows, logits_of(step)], choosers)[-1].token)
        return tokens

    company = [
        Sampling(temperature=1.0, seed=1),
        Sampling(),
        Sampling(temperature=2.0, top_k=3, top_p=0.2),
        Sampling(temperature=1.0, top_k=1000),
    ]
    for rules in ({}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.1}):
        sampling = Sampling(temperature=1.5, seed=11, **rules)
        expected = answer([], sampling)
        assert len(set(expected)) > 2
        for count in range(1, 5):
            assert answer(company[:count], sampling) == expected
        assert answer([], Sampling(temperature=1.5, seed=12, **rules)) != expected


def test_a_seed_means_the_same_beside_others_where_logits_are_equal() -> None:
    rows = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    own = Sampling(temperature=1.0, top_k=50, seed=7)
    choosers = [Chooser(Sampling(temperature=1.0, top_p=0.9), []), Chooser(own, [])]
    beside = [chosen(list(rows), choosers)[1].token for _ in range(20)]
    assert beside == drawn(rows[1], own, 20)


def test_without_a_seed_two_answers_differ() -> None:
    def answer() -> list[int]:
        chooser = Chooser(Sampling(temperature=3.0), [])
        return [chosen([logits_of(step)], [chooser])[0].token for step in range(30)]

    assert answer() != answer()


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_any_seed_of_64_bits_is_taken(seed: int) -> None:
    assert chosen([logits_of(0)], [Chooser(Sampling(temperature=1.0, seed=seed), [])])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_torch_does_not_take_is_refused_at_once(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed="):
        Sampling(seed=seed)


def adjusted(sampling: Sampling, prompt: list[int], answer: list[int]) -> torch.Tensor:
    chooser, logits = Chooser(sampling, prompt), logits_of(5)
    for token in answer:
        chooser.accept(token)
    assert not adjust(logits[None], [chooser])
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, answer = [3, 3, 7], [9, 3, 9]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), logits_of(5)[None]
    )[0]
    ours = adjusted(Sampling(repetition_penalty=penalty), prompt, answer)
    torch.testing.assert_close(ours, theirs)


def test_presence_and_frequency_penalties_are_those_of_openai() -> None:
    # https://platform.openai.com/docs/api-reference: logits - count * frequency - (count > 0) *
    # presence, over what was generated and not over the prompt.
    sampling = Sampling(presence_penalty=0.6, frequency_penalty=-0.25)
    expected = logits_of(5)
    expected[9] -= 2 * -0.25 + 0.6
    expected[4] -= -0.25 + 0.6
    torch.testing.assert_close(adjusted(sampling, [3, 7], [9, 4, 9]), expected)
    assert torch.equal(adjusted(sampling, [3, 7], []), logits_of(5))


def test_a_bias_is_added_and_wins() -> None:
    wanted = adjusted(Sampling(logit_bias={8: 100, 2: -1.5}), [], [])
    expected = logits_of(5)
    expected[8] += 100
    expected[2] -= 1.5
    torch.testing.assert_close(wanted, expected)
    chooser = Chooser(Sampling(logit_bias={8: 100}, temperature=1.0), [])
    assert chosen([logits_of(5)], [chooser])[0].token == 8


def test_logprobs_are_of_the_adjusted_logits() -> None:
    sampling = Sampling(logit_bias={8: 5}, top_logprobs=3, temperature=0.5, seed=1)
    choice = chosen([logits_of(5)], [Chooser(sampling, [])])[0]
    expected = adjusted(sampling, [], []).log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected[choice.token]), rel=1e-5)
    values, places = expected.topk(3)
    assert [token for token, _ in choice.top] == places.tolist()
    assert [value for _, value in choice.top] == pytest.approx(values.tolist(), rel=1e-5)


@pytest.mark.parametrize(("asked", "got"), [(0, 0), (SIZE, SIZE), (1000, SIZE)])
def test_as_many_logprobs_are_told_as_there_are(asked: int, got: int) -> None:
    choice = chosen([logits_of(5)], [Chooser(Sampling(top_logprobs=asked), [])])[0]
    assert len(choice.top) == got and choice.logprob < 0


class Evens:
    """A grammar that has even tokens only and is over after three of them."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    @property
    def is_over(self) -> bool:
        return len(self.accepted) == 3

    def restrict(self, logits: torch.Tensor) -> None:
        logits[1::2] = -math.inf

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        self.accepted.append(token)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_grammar_has_the_last_word(temperature: float) -> None:
    sampling = Sampling(grammar=Evens(), logit_bias={1: 100.0}, temperature=temperature)
    chooser = Chooser(sampling, [])
    for step in range(20):
        token = chosen([logits_of(step)], [chooser])[0].token
        chooser.accept(token)
        assert token % 2 == 0
    assert len(sampling.grammar.accepted) == 20


def test_rules_that_fail_are_one_requests_matter() -> None:
    class Broken(Evens):
        def restrict(self, logits: torch.Tensor) -> None:
            logits.fill_(math.nan)
            raise RuntimeError("broken grammar")

    rules = [
        Sampling(),
        Sampling(grammar=Broken(), temperature=1.0),
        Sampling(temperature=1, seed=4),
    ]
    choosers = [Chooser(each, []) for each in rules]
    first, error, last = choose([logits_of(1), logits_of(2), logits_of(3)], choosers)
    assert first == Choice(int(logits_of(1).argmax()))
    assert str(error) == "broken grammar"
    assert [last] == chosen([logits_of(3)], [Chooser(rules[2], [])])


def test_a_prompt_token_without_a_logit_is_an_error_of_its_request_alone() -> None:
    rows = torch.arange(20.0).view(2, 10)
    choosers = [Chooser(Sampling(repetition_penalty=2.0), [12]), Chooser(Sampling(), [])]
    error, choice = choose(list(rows), choosers)
    assert isinstance(error, IndexError) and choice.token == 9


def test_logprobs_of_what_cannot_come_are_numbers() -> None:
    bias = dict.fromkeys(range(1, 6), -torch.inf)
    (choice,) = chosen(
        [logits_of(3, size=6)], [Chooser(Sampling(top_logprobs=3, logit_bias=bias), [])]
    )
    assert choice.token == 0 and [value for _, value in choice.top] == [0.0, -9999.0, -9999.0]
