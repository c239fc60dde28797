"""Everything that makes stored K/V invalid for another model, as bytes for the key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch

from kvboost.core import KVGeometry
from kvboost.weights.stream import streamed

# What a config says beside the computation. The tokenizer is no part either: K/V belongs to ids.
COSMETIC = ("architectures", "dtype", "id2label", "label2id", "transformers_version", "use_cache")
# The same of an adapter's config: where it comes from, and what is over once it is trained.
COSMETIC_OF_ADAPTERS = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "peft_version",
    "revision",
    "task_type",
)
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)\b")  # inside PEFT's layers

NUM_PICKED = 256  # bytes of a tensor that count by themselves
PIECE_BYTES = 1 << 23  # read at once; a multiple of 8


def fingerprint(model: torch.nn.Module, geometry: KVGeometry) -> bytes:
    """Digest of the weights and buffers as loaded, the settings and the geometry.

    Adapters are no part of it: a model has the same one before and after they came in.
    """
    config: Any = model.config
    settings = {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if name not in COSMETIC and not name.startswith("_")
    }
    if settings.get("quantization_config"):  # the weights of a GGUF file count, not where it lies
        quantization = dict(settings["quantization_config"])
        quantization.pop("gguf_file", None)
        settings["quantization_config"] = quantization
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(repr(geometry).encode())
    weights = streamed(model)
    for name, tensor in sorted(_base_tensors(model)):
        if weights is None:
            _add_tensor(digest, name, tensor)
        else:
            _add_tensor(digest, name, weights.source(tensor), weights.forget)
    if weights is not None:
        weights.reset()
    return digest.digest()


def adapter_digest(model: torch.nn.Module, slot: str) -> bytes:
    """Digest of what an adapter adds to a model, and of its settings; not of its name."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415  (an extra)

    config: Any = model.peft_config
    digest = sha256(said_by(config[slot].to_dict()))
    for path, layer in adapter_layers(model).items():
        if slot in getattr(layer, "scaling", ()):
            digest.update(f"{path} {layer.scaling[slot]}".encode())
    saved = get_peft_model_state_dict(model, adapter_name=slot, save_embedding_layers=False)
    for name, tensor in sorted(saved.items()):
        _add_tensor(digest, name, tensor)
    return digest.digest()


def said_by(config: Mapping[str, Any]) -> bytes:
    """The settings of an adapter that count."""
    settings = {n: each for n, each in config.items() if n not in COSMETIC_OF_ADAPTERS}
    plain = {n: sorted(each) if isinstance(each, set) else each for n, each in settings.items()}
    return json.dumps(plain, sort_keys=True, default=str).encode()


def adapter_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The layers that PEFT has put into a model, by their paths."""
    found = model.named_modules()
    return {path: layer for path, layer in found if hasattr(layer, "adapter_layer_names")}


def _base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers without those of adapters, by the names they have without these."""
    layers = adapter_layers(model)
    added = [
        f"{path}.{name}."
        for path, layer in layers.items()
        for name in (*layer.adapter_layer_names, *layer.other_param_names)
    ]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith(tuple(added)):
            yield (WRAPPED.sub("", name) if layers else name), tensor


def _add_tensor(
    digest: Any,
    name: str,
    tensor: torch.Tensor,
    forget: Callable[[torch.Tensor], None] = lambda _: None,
) -> None:
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(_sample(tensor.detach(), forget))


def _sample(tensor: torch.Tensor, forget: Callable[[torch.Tensor], None]) -> bytes:
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
        forget(piece)
    return (total % 2**64).to_bytes(8, "little") + picked[:NUM_PICKED]
