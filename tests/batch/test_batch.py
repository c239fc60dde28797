"""The batch on tiny models: every answer is what it is alone, whoever else is there."""

from __future__ import annotations

import pytest

from batching import alone, engine_of, greedy, mixed_prompts

pytestmark = pytest.mark.tiny


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3-two-rotations",
        "mistral-sliding",
        "gpt_oss-sinks",
        "deepseek_v3-mla",
        "llama-dynamic",
    ],
)
def test_answers_in_a_batch_are_the_answers_alone(name: str) -> None:
    prompts = mixed_prompts(14)
    expected = [alone(prompt, 8, name) for prompt in prompts]
    with engine_of(name, max_batch_size=6) as engine:
        for reuse in ("exact", "exact", "off"):
            tickets = [engine.submit(prompt, greedy(8), reuse=reuse) for prompt in prompts]
            assert [list(ticket.result(60).token_ids) for ticket in tickets] == expected
        assert engine.batch_stats()["num_running"] == engine.batch_stats()["num_waiting"] == 0
