"""Checkpoints of a real model's shape with random weights, written without a model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
SHARD_BYTES = 4 * 10**9


def save_random(shape: str, folder: Path) -> None:
    """A bfloat16 checkpoint in shards, with a tokenizer that knows a few numbers."""
    config = AutoConfig.for_model(
        "qwen2",
        **SHAPES[shape],
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    words = Tokenizer(WordLevel({str(token): token for token in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    homes: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, like in names.items():
        shard[name] = _weight(name, like.shape, generator)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            _save(shard, folder, homes)
    _save(shard, folder, homes)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    if name.endswith("norm.weight"):
        return tensor.fill_(1)
    return tensor.normal_(0, 0.02, generator=generator)


def _save(shard: dict[str, torch.Tensor], folder: Path, homes: dict[str, str]) -> None:
    if shard:
        name = f"model-{1 + len(set(homes.values())):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        homes |= dict.fromkeys(shard, name)
        shard.clear()
