"""An engine with few places, which must all be there again after every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from batching import NUM_PLACES, WAIT_S, alone, come_to_rest, engine_of, greedy
from fakes import WordTokenizer, words
from kvboost import KVBoost


class SpoiltTokenizer(WordTokenizer):
    """Raises for one word."""

    def decode(self, tokens: list[int], **settings: Any) -> str:
        if 3 in tokens:
            raise ValueError("a word that cannot be read")
        return super().decode(tokens, **settings)


@pytest.fixture(scope="module")
def made() -> Iterator[KVBoost]:
    with engine_of(max_batch_size=2, max_queue_size=3) as engine:
        engine._front._tokenizer = SpoiltTokenizer()
        yield engine


@pytest.fixture
def engine(made: KVBoost) -> Iterator[KVBoost]:
    """An engine that, whatever a test did to it, has all its places again and answers well."""
    yield made
    come_to_rest(made)
    prompts = [words(20 + number, seed=number) for number in range(NUM_PLACES)]
    tickets = [made.submit(prompt, greedy(3)) for prompt in prompts]
    assert [list(each.result(WAIT_S).token_ids) for each in tickets] == [
        alone(prompt, 3) for prompt in prompts
    ]
    come_to_rest(made)
    assert made.batch_stats()["kv_bytes"] == 0 and len(made._front._batch._live) == 0
