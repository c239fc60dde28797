"""Everything that makes stored K/V invalid for another model, as bytes for the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

from kvboost.core import KVGeometry
from kvboost.weights.stream import streamed

# What a config says beside the computation. The tokenizer is no part either: K/V belongs to ids.
COSMETIC = ("architectures", "dtype", "id2label", "label2id", "transformers_version", "use_cache")

NUM_PICKED = 256  # bytes of a tensor that count by themselves
PIECE_BYTES = 1 << 23  # read at once; a multiple of 8


def fingerprint(model: torch.nn.Module, geometry: KVGeometry) -> bytes:
    """Digest of the weights and buffers as loaded, the settings and the geometry."""
    config: Any = model.config
    settings = {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if name not in COSMETIC and not name.startswith("_")
    }
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(repr(geometry).encode())
    weights = streamed(model)
    here = sorted([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in here if weights is None else weights.tensors():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sample(tensor.detach(), None if weights is None else weights.forget))
    return digest.digest()


def _sample(tensor: torch.Tensor, forget: Callable[[torch.Tensor], None] | None = None) -> bytes:
    """A checksum over all bits and some bytes in full; reads each once, `forget` is told which."""
    raw = tensor.reshape(-1).view(torch.uint8)
    step = max(1, len(raw) // NUM_PICKED)
    total, picked = 0, b""
    for start in range(0, len(raw), PIECE_BYTES):
        piece = raw[start : start + PIECE_BYTES]
        whole = len(piece) // 8 * 8
        # Added up modulo 2**64, which no order of summation changes.
        words = piece[:whole].view(torch.int64).sum() + piece[whole:].sum(dtype=torch.int64)
        total += int(words)
        picked += bytes(piece[-start % step :: step].cpu().numpy())
        if forget is not None:
            forget(piece)
    return (total % 2**64).to_bytes(8, "little") + picked[:NUM_PICKED]
