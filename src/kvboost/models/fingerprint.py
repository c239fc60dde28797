"""Everything that makes stored K/V invalid for another model, as bytes for the key."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import torch

from kvboost.core import KVGeometry

# Settings that change K/V while all weights stay the same. What they do not name shows in the
# weights or in the geometry. The tokenizer is not part: K/V belongs to token ids.
SETTINGS = (
    "model_type",
    "rope_parameters",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "attention_chunk_size",
    "no_rope_layers",
    "rms_norm_eps",
    "layer_norm_eps",
    "hidden_act",
    "hidden_activation",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "num_experts_per_tok",
)


def fingerprint(model: torch.nn.Module, geometry: KVGeometry) -> bytes:
    """Digest of the weights as loaded, the settings and the geometry."""
    config: Any = model.config
    text = config.get_text_config()
    settings = {name: getattr(text, name, None) for name in SETTINGS}
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(repr(geometry).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(_sample(weight.detach()))
    return digest.digest()


def _sample(weight: torch.Tensor) -> bytes:
    """A checksum over all bits and some bytes in full: reads each weight once, copies none."""
    raw = weight.reshape(-1).view(torch.uint8)
    whole = len(raw) // 8 * 8
    # Added up modulo 2**64, which no order of summation changes.
    total = raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)
    picked = raw[:: max(1, len(raw) // 256)][:256]
    return bytes(total.cpu().numpy().tobytes() + picked.cpu().numpy().tobytes())
