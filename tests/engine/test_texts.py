"""What callers hand in, as token ids."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from fake_serving import CharTokenizer
from kvboost.engine.texts import MOST_OCCURRENCES, _cut_at, check_ids, tokens_of
from kvboost.errors import ConfigError


def test_documents_may_not_stand_in_a_prompt_without_end() -> None:
    text = "ab" * MOST_OCCURRENCES
    assert len(tokens_of(text, CharTokenizer(), ["a"])) == len(text)
    with pytest.raises(ConfigError, match="more than"):
        tokens_of(text + "a", CharTokenizer(), ["a"])


def test_of_documents_that_begin_alike_the_longer_one_is_found() -> None:
    assert _cut_at("abcd e", ["ab", "abcd"]) == [("abcd", 1), (" e", None)]


@pytest.mark.parametrize(
    "token", [512, -1, 2**32, -(2**70), 1.0, "7", None, [3], torch.tensor(0.5)]
)
def test_ids_that_a_model_lacks_are_refused_with_their_place(token: object) -> None:
    with pytest.raises(ConfigError, match=r"token 2 of the prompt is .*: the model knows 0 to 511"):
        check_ids([0, 511, token, 600], 512, "the prompt")  # type: ignore[list-item]


def test_ids_of_any_whole_type_are_taken() -> None:
    for tokens in ([0, 511], np.array([0, 511]), torch.tensor([0, 511]), []):
        check_ids(tokens, 512, "the prompt")


@pytest.mark.alone
def test_checking_a_long_prompt_takes_a_few_milliseconds() -> None:
    tokens, times = list(range(131_072)), []
    for _ in range(20):
        started = time.perf_counter()
        check_ids(tokens, 131_072, "the prompt")
        times.append(time.perf_counter() - started)
    assert min(times) < 5e-3
