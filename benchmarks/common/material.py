"""Models and token streams for the benchmarks. Text comes from Python's own documentation."""

from __future__ import annotations

import argparse
import random
from functools import lru_cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.weights.random_checkpoint import SHAPES
from get_model import get_model
from kvboost import KVBoost
from kvboost.bench.questions.subjects import DTYPES
from kvboost.bench.texts import reference_pages

RANDOM_1_5B = "random-1.5b"
TALL = "tall"


def engine_of(options: argparse.Namespace, **settings: Any) -> KVBoost:
    """An engine with the model that was asked for."""
    return KVBoost(model(options), tokenizer(options.model), **settings)


def model(options: argparse.Namespace) -> Any:
    """A model by name or folder, or random weights (speed only): `random-1.5b` or `tall`."""
    dtype = DTYPES[options.dtype]
    if options.model == TALL:
        return tall().to(dtype)
    if options.model != RANDOM_1_5B:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    shape = SHAPES["qwen2.5-1.5b"]
    config = Qwen2Config(**shape, max_position_embeddings=32768, tie_word_embeddings=True)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def dtype_name(options: argparse.Namespace) -> str:
    """The dtype that was asked for, as others call it."""
    return str(DTYPES[options.dtype]).removeprefix("torch.")


def tokenizer(name: str) -> Any:
    if name == TALL:
        return NoWords()
    return AutoTokenizer.from_pretrained(str(get_model()) if name == RANDOM_1_5B else name)


@lru_cache(maxsize=1)
def documents() -> list[str]:
    """Pages of the Python language reference, long ones first."""
    return sorted(reference_pages(), key=len, reverse=True)


def stream(tokenizer: Any, num_tokens: int, seed: int) -> list[int]:
    """`num_tokens` tokens of running text that starts differently for every seed."""
    if isinstance(tokenizer, NoWords):
        return random_tokens(num_tokens, seed)
    pages = list(documents())
    random.Random(seed).shuffle(pages)
    tokens: list[int] = tokenizer(f"Part {seed}. ").input_ids
    for page in pages:
        if len(tokens) >= num_tokens:
            break
        tokens += tokenizer("\n\n" + page, add_special_tokens=False).input_ids
    return tokens[:num_tokens]


def tall() -> LlamaForCausalLM:
    """A model with the K/V of an 8B model (128 KB a token in fp32) and few weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=262144,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class NoWords:
    """A tokenizer for token ids alone, which the tall model has."""

    chat_template = None

    def decode(self, tokens: list[int], **_: object) -> str:
        return " ".join(map(str, tokens))

    batch_decode = staticmethod(lambda rows, **_: [" ".join(map(str, row)) for row in rows])


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    """Token ids for the tall model."""
    chance = random.Random(seed)
    return [chance.randrange(5, 500) for _ in range(num_tokens)]
