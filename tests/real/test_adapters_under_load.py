"""Two LoRAs and the base model of a real one, 100 requests by turns: no answer is another's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvboost import KVBoost
from kvboost.core import Sampling
from loras import adapted, answer_of, save_adapter

pytestmark = [pytest.mark.model, pytest.mark.long]
NAMES = ("", "a", "b")
NUM_REQUESTS, NUM_NEW = 100, 4
MANUAL = (
    "The pump of the garden fountain must be switched off before the basin is cleaned. Take the "
    "filter out, rinse it under warm water, and let it dry in the shade for an hour. In winter the "
    "pump is kept in a bucket of water in the cellar, where it does not freeze. "
) * 3
QUESTIONS = (
    "When is the pump switched off?",
    "Where does the filter dry?",
    "What happens in winter?",
    "How is the filter rinsed?",
)


def load(smol: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()


def test_a_hundred_requests_of_three_adapters_are_each_as_alone(smol: str, tmp_path: Path) -> None:
    folders = {
        name: save_adapter(load(smol), tmp_path / name, seed, r=8)
        for seed, name in enumerate(NAMES[1:])
    }
    chance = random.Random(0)
    with KVBoost.from_pretrained(smol, dtype=torch.float32, adapters=folders) as engine:
        prompts = [
            engine.tokenizer(MANUAL[: chance.choice([400, 700])] + question).input_ids
            for question in QUESTIONS
            for _ in range(2)
        ]
        alone = {
            name: [answer_of(model, prompt, NUM_NEW) for prompt in prompts]
            for name, model in models_of(smol, folders)
        }
        first = {name: engine.generate(prompts[0], 1, adapter=name).cached_tokens for name in NAMES}
        assert first == dict.fromkeys(NAMES, 0)
        asked = [(name, chance.randrange(len(prompts))) for name in NAMES * (NUM_REQUESTS // 3 + 1)]
        chance.shuffle(asked)
        sampling = Sampling(max_new_tokens=NUM_NEW)
        tickets = []
        for number, (name, which) in enumerate(asked[:NUM_REQUESTS]):
            if number % 3 == 0:
                result = engine.generate(prompts[which], NUM_NEW, adapter=name)
                assert result.token_ids == alone[name][which]
            else:
                ticket = engine.submit(prompts[which], sampling, adapter=name)
                tickets.append((ticket, alone[name][which]))
        for ticket, wanted in tickets:
            assert list(ticket.result(120).token_ids) == wanted
        engine.flush()
        stats = engine.cache_stats()
        assert stats["foreign_frames"] == 0
        assert stats["requests"] == NUM_REQUESTS + len(NAMES)
        assert all(stats["adapters"][name]["cache_hits"] > 0 for name in NAMES)
        assert len({tuple(answers[0]) for answers in alone.values()}) > 1


def models_of(smol: str, folders: dict[str, str]) -> list[tuple[str, Any]]:
    """What answers without us, by name."""
    return [("", load(smol)), *((name, adapted(load(smol), at)) for name, at in folders.items())]
