"""Tiny random-weight models of many architectures, built from their configs: no download.

They prove that the plumbing (masks, positions, cached tensors) is right for an architecture; they
say nothing of a model's quality.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fakes import byte_tokenizer

VOCABULARY = 512
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 24}
_HEAD = {"head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 3}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 1024,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 5e5,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 1024,
}

# name -> (model type, what differs from _BASE)
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "bitnet": ("bitnet", {}),
    "cohere": ("cohere", {}),
    "cohere2-sliding": ("cohere2", _WINDOW),
    "deepseek_v3-mla": (
        "deepseek_v3",
        _MLA
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "diffllama": ("diffllama", {}),
    "ernie4_5": ("ernie4_5", _HEAD),
    "exaone4-sliding": ("exaone4", _WINDOW | {"sliding_window_pattern": 4}),
    "gemma": ("gemma", _HEAD),
    "gemma2-softcap": ("gemma2", _HEAD | _WINDOW | {"query_pre_attn_scalar": 16}),
    "gemma3-two-rotations": ("gemma3_text", _HEAD | _WINDOW | {"query_pre_attn_scalar": 16}),
    "gemma3n-shared-kv": (
        "gemma3n_text",
        _HEAD
        | _WINDOW
        | _MIXED_LAYERS
        | {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "activation_sparsity_pattern": [0.0] * 6,
            "laurel_rank": 8,
        },
    ),
    "gemma4": (
        "gemma4_text",
        _HEAD
        | _WINDOW
        | _MIXED_LAYERS
        | {
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
        },
    ),
    "glm-interleaved": ("glm", _HEAD),
    "glm4": ("glm4", _HEAD),
    "gpt_neox-partial": ("gpt_neox", {}),
    "gpt_oss-sinks": ("gpt_oss", _HEAD | _WINDOW | _LOCAL_MOE),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", _LOCAL_MOE),
    "helium": ("helium", _HEAD),
    "hunyuan": ("hunyuan_v1_dense", _HEAD),
    "llama": ("llama", {}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama4-chunked-nope": (
        "llama4_text",
        _HEAD
        | {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 32,
        },
    ),
    "minicpm3-mla": ("minicpm3", _MLA),
    "ministral-sliding": ("ministral", _HEAD | _WINDOW),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", _WINDOW),
    "mixtral": ("mixtral", _LOCAL_MOE),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3-sliding": ("olmo3", _WINDOW),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "persimmon": ("persimmon", {"num_key_value_heads": 4}),
    "phi-partial": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 1024, "rope_parameters": _LONGROPE},
    ),
    "phimoe": ("phimoe", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", _WINDOW | {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen2_moe": ("qwen2_moe", _MOE | {"shared_expert_intermediate_size": 32}),
    "qwen3-qknorm": ("qwen3", _HEAD),
    "qwen3_moe": ("qwen3_moe", _HEAD | _MOE),
    "seed_oss": ("seed_oss", _HEAD),
    "smollm3-nope": ("smollm3", {}),
    "stablelm-partial": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
}

# name -> (model type, config, what the refusal must say)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom-alibi": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, "attention"),
    "falcon": ("falcon", {}, "attention"),
    "gptj": ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "attention"),
    "mpt-alibi": ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4}, "attention"),
    "qwen3_next-recurrent": (
        "qwen3_next",
        _HEAD | _MOE | {"shared_expert_intermediate_size": 32},
        "recurrent",
    ),
}


def build(model_type: str, differences: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model with random weights, large enough that a wrong position shows in the logits."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(_BASE | differences))
    for part in (config, config.get_text_config()):
        if hasattr(part, "initializer_range"):
            part.initializer_range = 0.12
    return AutoModelForCausalLM.from_config(config).eval()


CHAT_TEMPLATE = """\
{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def save(folder: Path) -> str:
    """A model with a tokenizer for a server to load; what it says means nothing."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    build("llama", size | {"num_hidden_layers": 2}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
