"""Trained weights and real text: what a user sees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvboost import KVBoost, install_flash_attention, uninstall_flash_attention
from kvboost.core import Span
from kvboost.engine.prefill import Terms, complete, prefill

pytestmark = pytest.mark.model

TEXT = "\n\n".join(sorted(topics.values(), key=len)[-12:])


@pytest.fixture(scope="module")
def engine(smol: str) -> Iterator[KVBoost]:
    with KVBoost.from_pretrained(smol, dtype=torch.float32) as made:
        yield made


def prompts(engine: KVBoost, count: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """(what is stored beforehand, prompt): shares from 0 to 99 %, cuts off the chunk grid."""
    tokens = engine.tokenizer(TEXT).input_ids
    made = []
    for turn in range(count):
        chance = random.Random(turn)
        length = chance.randint(50, longest)
        shared = int(length * 0.99 * turn / (count - 1))
        start, other = chance.randrange(10_000), chance.randrange(10_000, 20_000)
        head = tokens[start : start + shared]
        tail = tokens[other : other + length - shared]
        made.append((head + tokens[other + 7 : other + 40], head + tail))
    return made


def assert_cold_warm_and_plain_agree(
    folder: str, engine: KVBoost, count: int, longest: int, num_new: int = 8
) -> None:
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for stored, prompt in prompts(engine, count, longest):
        engine.warm(stored)
        cold = engine.generate(prompt, num_new, reuse="off").token_ids
        warm = engine.generate(prompt, num_new)
        ids = torch.tensor([prompt])
        plain = bare.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False
        )
        assert cold == warm.token_ids == plain[0, len(prompt) :].tolist()
    assert warm.kv_reuse_ratio > 0.9


def test_greedy_text_is_the_same_cold_warm_and_plain(smol: str, engine: KVBoost) -> None:
    assert_cold_warm_and_plain_agree(smol, engine, count=5, longest=500)


def test_greedy_text_is_the_same_on_a_second_architecture(coder: str) -> None:
    with KVBoost.from_pretrained(coder, dtype=torch.float32) as second:
        assert_cold_warm_and_plain_agree(coder, second, count=2, longest=150, num_new=4)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)]
)
def test_deterministic_prefill_gives_the_same_bits_cold_and_warm(
    smol: str, dtype: torch.dtype
) -> None:
    engine = KVBoost.from_pretrained(smol, dtype=dtype, deterministic=True, piece_tokens=128)
    for stored, prompt in prompts(engine, 4, 500)[2:]:
        engine.warm(stored)
        seen = []
        for reuse in ("off", "exact"):
            prefilled = prefill(prompt, engine._parts, Terms(reuse), capacity=1000)
            logits = complete(prefilled, prompt, engine._parts)
            rows = prefilled.rows.read(Span(0, len(prompt)))
            seen.append([logits, *(plane.clone() for plane in rows)])
            prefilled.rows.release()
        assert prefilled.plan.num_reused == (len(stored) - 33) // 128 * 128
        assert all(torch.equal(cold, warm) for cold, warm in zip(*seen, strict=True))
        texts = {engine.generate(prompt, 8, reuse=reuse).output_text for reuse in ("off", "exact")}
        assert len(texts) == 1
    assert prefilled.plan.num_reused > 0


def test_a_growing_chat_reuses_its_history(engine: KVBoost) -> None:
    messages = [{"role": "system", "content": TEXT[2000:3000]}]
    seen = 0
    for turn in range(4):
        question = TEXT[5000 + 400 * turn : 5200 + 400 * turn]
        messages.append({"role": "user", "content": f"Explain in short: {question}"})
        result = engine.chat(messages, 12)
        if turn > 0:
            assert result.cached_tokens >= 0.95 * seen
        assert result.token_ids == engine.chat(messages, 12, reuse="off").token_ids
        messages.append({"role": "assistant", "content": result.output_text})
        seen = result.prompt_tokens + len(result.token_ids)


def test_stop_strings_and_streams_on_real_text(engine: KVBoost) -> None:
    prompt = "Count: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22"
    whole = engine.generate(prompt, 24).output_text
    assert "25" in whole
    cut = engine.generate(prompt, 24, stop_strings=["25"])
    assert cut.output_text == whole[: whole.index("25") + 2] and cut.cached_tokens > 0
    assert "".join(engine.stream(prompt, 24)) == whole


@torch.no_grad()
def test_attention_tiers_give_the_models_own_logits(smol: str, engine: KVBoost) -> None:
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    tokens = torch.tensor([engine.tokenizer(TEXT).input_ids[:400]])

    def logits() -> torch.Tensor:
        cache = DynamicCache()
        parts = [tokens[:, :250], tokens[:, 250:380], tokens[:, 380:]]
        return torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])

    native = logits()
    for tier in ("flash_sdpa", "sdpa"):
        install_flash_attention(model, tier)
        assert torch.allclose(logits(), native, atol=1e-3)
    uninstall_flash_attention(model)
    assert torch.equal(logits(), native)


def test_the_built_in_check_hits_and_holds(engine: KVBoost) -> None:
    report = engine.verify_correctness()
    assert report, str(report)
    assert all(check.cached_tokens > 0.9 * check.prompt_tokens for check in report.checks)
    assert {check.top1_ratio for check in report.checks} == {1.0}
