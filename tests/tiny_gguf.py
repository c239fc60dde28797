"""A tiny GGUF file with random weights, written on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fakes import MERGES, byte_tokenizer

WIDTH, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
BOS, END, END_OF_TURN = "<|begin|>", "<|end|>", "<|turn|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|turn|>"
    "{% endfor %}[assistant]"
)


def write_gguf(
    path: Path,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    template: str | None = CHAT_TEMPLATE,
    **more: Any,
) -> Path:
    """Write a llama; `more` are further entries of the header, by their methods in the writer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    num_tokens = _add_tokenizer(writer)
    if template is not None:
        writer.add_chat_template(template)
    for name, value in more.items():
        getattr(writer, name)(value)
    for name, weights in _weights(num_tokens).items():
        blocks = weights.ndim > 1 and quantisation != gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(weights, quantisation) if blocks else weights
        writer.add_tensor(name, packed, raw_dtype=quantisation if blocks else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> int:
    backend = byte_tokenizer()
    vocabulary = backend.get_vocab()
    plain = sorted((token for token in vocabulary if token != END), key=vocabulary.__getitem__)
    tokens = [*plain, BOS, END, END_OF_TURN]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.NORMAL] * len(plain)
    writer.add_token_types([*kinds, *[gguf.TokenType.CONTROL] * (len(tokens) - len(plain))])
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(tokens.index(BOS))
    writer.add_eos_token_id(tokens.index(END))
    return len(tokens)


def _weights(num_tokens: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv_width, WIDTH), "attn_v": (kv_width, WIDTH)}
    shapes |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (2 * WIDTH, WIDTH)}
    shapes |= {"ffn_up": (2 * WIDTH, WIDTH), "ffn_down": (WIDTH, 2 * WIDTH)}
    made = {"token_embd.weight": chance.normal(size=(num_tokens, WIDTH))}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            made[f"blk.{layer}.{name}.weight"] = chance.normal(size=shape) / 8
        for name in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{name}.weight"] = np.ones(WIDTH)
    made["output_norm.weight"] = np.ones(WIDTH)
    return {name: weights.astype(np.float32) for name, weights in made.items()}
