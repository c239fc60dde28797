"""The batch on tiny models: every answer is what it is alone, whoever else is there."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.core import Sampling
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny

GREEDY = Sampling(max_new_tokens=12, ignore_eos=True)


def engine_of(name: str = "llama", **options: Any) -> KVBoost:
    return KVBoost(build(*SUPPORTED[name]), WordTokenizer(), chunk_size=16, **options)


def mixed_prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    common = words(160, seed=99)
    return [
        common[: chance.choice([0, 30, 130, 150, 160])] + words(chance.randint(1, 90), seed=number)
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "name", ["llama", "gemma3-two-rotations", "gpt_oss-sinks", "deepseek_v3-mla", "llama-dynamic"]
)
@pytest.mark.parametrize("reuse", ["exact", "off"])
def test_answers_in_a_batch_are_the_answers_alone(name: str, reuse: str) -> None:
    prompts = mixed_prompts(24)
    with engine_of(name) as engine:
        alone = [engine.generate(p, 12, reuse="off", eos_token_id=None).token_ids for p in prompts]
    with engine_of(name, max_batch_size=7) as engine:
        for _ in range(2):
            tickets = [engine.submit(prompt, GREEDY, reuse=reuse) for prompt in prompts]
            assert [list(ticket.result(60).token_ids) for ticket in tickets] == alone
        assert engine.batch_stats()["num_running"] == engine.batch_stats()["num_waiting"] == 0
