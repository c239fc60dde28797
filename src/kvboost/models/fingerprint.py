"""Everything that makes stored K/V invalid for another model, as bytes for the key."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import torch

from kvboost.core import KVGeometry

# What a config says beside the computation. The tokenizer is no part either: K/V belongs to ids.
COSMETIC = ("architectures", "dtype", "id2label", "label2id", "transformers_version", "use_cache")


def fingerprint(model: torch.nn.Module, geometry: KVGeometry) -> bytes:
    """Digest of the weights and buffers as loaded, the settings and the geometry."""
    config: Any = model.config
    settings = {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if name not in COSMETIC and not name.startswith("_")
    }
    if "quantization_config" in settings:  # the weights of a GGUF file count, not where it lies
        quantization = dict(settings["quantization_config"])
        quantization.pop("gguf_file", None)
        settings["quantization_config"] = quantization
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(repr(geometry).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sample(tensor.detach()))
    return digest.digest()


def _sample(tensor: torch.Tensor) -> bytes:
    """A checksum over all bits and some bytes in full: reads each tensor once, copies none."""
    raw = tensor.reshape(-1).view(torch.uint8)
    whole = len(raw) // 8 * 8
    # Added up modulo 2**64, which no order of summation changes.
    total = raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)
    picked = raw[:: max(1, len(raw) // 256)][:256]
    return bytes(total.cpu().numpy().tobytes() + picked.cpu().numpy().tobytes())
