"""The batch on tiny models: every answer is what it is alone, whoever else is there."""

from __future__ import annotations

import pytest

from batching import alone, answers, are_all_free, engine_of, greedy, mixed_prompts

pytestmark = pytest.mark.tiny


@pytest.mark.parametrize(
    ("name", "block_size", "num_blocks"),
    [
        ("llama", 16, None),
        ("llama", 16, 64),
        ("llama", 7, 90),
        ("llama", 200, 5),
        ("gemma3-two-rotations", 7, 90),
        ("mistral-sliding", 7, 90),
        ("gpt_oss-sinks", 7, 90),
        ("deepseek_v3-mla", 7, 90),
        ("llama-dynamic", 7, 90),
    ],
)
def test_answers_in_a_batch_are_the_answers_alone(
    name: str, block_size: int, num_blocks: int | None
) -> None:
    prompts = mixed_prompts(14)
    expected = [alone(prompt, 8, name) for prompt in prompts]
    blocks = {"block_size": block_size, "num_blocks": num_blocks}
    with engine_of(name, max_batch_size=6, **blocks) as engine:
        for reuse in ("exact", "exact", "off"):
            tickets = [engine.submit(prompt, greedy(8), reuse=reuse) for prompt in prompts]
            assert answers(tickets) == expected
        assert engine.batch_stats()["num_running"] == engine.batch_stats()["num_waiting"] == 0
        assert are_all_free(engine)
