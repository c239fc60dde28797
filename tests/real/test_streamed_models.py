"""Real models with most of their weights elsewhere say what they say with all of them in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost import KVBoost
from kvboost.weights.stream import WeightStats, streamed
from quantised_checkpoints import save_awq

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
NUM_NEW = 24


def stats_of_a_chat(folder: str, max_weight_bytes: int, num_new: int) -> WeightStats:
    """How weights came and went while the model said what the whole model says."""
    with KVBoost.from_pretrained(folder) as whole:
        wanted = whole.chat(QUESTION, num_new)
    with KVBoost.from_pretrained(folder, max_weight_bytes=max_weight_bytes) as engine:
        weights = streamed(engine._parts.model.model)
        assert weights is not None
        cold, warm = engine.chat(QUESTION, num_new), engine.chat(QUESTION, num_new)
        stats = weights.stats
    assert cold.output_text == warm.output_text == wanted.output_text
    assert warm.cached_tokens > 0
    assert stats.resident_bytes + stats.peak_window_bytes <= max_weight_bytes
    return stats


def test_the_text_is_that_of_the_whole_model(smol: str) -> None:
    """With 90 MB of the 538 MB of weights; the output layer alone has 113."""
    assert stats_of_a_chat(smol, 90 * 10**6, 8).streamed_bytes > 400 * 10**6


@pytest.mark.long
def test_the_text_of_a_larger_model_is_that_of_the_whole_one(coder: str) -> None:
    """In bfloat16, with 200 MB of the 1.26 GB of weights; the output layer alone has 272."""
    stats = stats_of_a_chat(coder, 200 * 10**6, NUM_NEW)
    assert stats.num_waits < 0.5 * stats.num_uses


def test_an_awq_checkpoint_of_a_real_model_says_what_the_dequantised_model_says(
    smol: str, tmp_path: Path
) -> None:
    dense = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smol)
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(Path(smol) / "generation_config.json", tmp_path)
    save_awq(dense, tmp_path, group_size=64)
    question = "The capital of France is"
    with KVBoost(dense, tokenizer) as whole:
        wanted = whole.generate(question, 8)
    with KVBoost.from_pretrained(str(tmp_path), max_weight_bytes=40 * 10**6) as engine:
        model = engine._parts.model.model
        answer = engine.generate(question, 8)
        weights = streamed(model)
    assert answer.output_text == wanted.output_text
    assert "Paris" in answer.output_text
    assert weights is not None
    assert weights.stats.streamed_bytes > 0
    ids = tokenizer(question, return_tensors="pt").input_ids
    with torch.no_grad():
        given, right = model(ids).logits, dense(ids).logits
    assert (given - right).norm() <= 1e-4 * right.norm()
