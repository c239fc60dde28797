"""Everything that makes stored K/V invalid for another model, as bytes for the key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from hashlib import sha256
from typing import Any

import torch

from kvboost.core import KVGeometry

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
WRAPPED = ("base_layer", "original_module", "token_adapter")  # what PEFT's layers have inside


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
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(repr(geometry).encode())
    for name, tensor in sorted(_base_tensors(model)):
        _add_tensor(digest, name, tensor)
    return digest.digest()


def adapter_digest(model: torch.nn.Module, slot: str) -> bytes:
    """Digest of what an adapter adds to a model, and of its settings; not of its name."""
    config: Any = model.peft_config
    settings = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config[slot].to_dict().items()
        if name not in COSMETIC_OF_ADAPTERS
    }
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path, layer in sorted(adapter_layers(model).items()):
        for attribute in _attributes(layer):
            part = _held(layer, attribute, slot)
            if isinstance(part, torch.nn.Module):
                for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                    _add_tensor(digest, f"{path} {attribute} {name}", tensor)
            elif isinstance(part, torch.Tensor):
                _add_tensor(digest, f"{path} {attribute}", part)
            elif part is not None:
                digest.update(f"{path} {attribute} {part}".encode())
    return digest.digest()


def adapter_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The layers that PEFT has put into a model, by their paths."""
    found = model.named_modules()
    return {path: layer for path, layer in found if hasattr(layer, "adapter_layer_names")}


def serves(layer: Any, slot: str) -> bool:
    """Whether a layer of PEFT has something for an adapter."""
    return any(_held(layer, attribute, slot) is not None for attribute in _attributes(layer))


def _base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers without those of adapters, by the names they have without these."""
    layers = adapter_layers(model)
    added = tuple(
        f"{path}.{name}." for path, layer in layers.items() for name in _attributes(layer)
    )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith(added):
            yield _plain_name(name, layers), tensor


def _plain_name(name: str, layers: Mapping[str, Any]) -> str:
    parts = name.split(".")
    return ".".join(
        part
        for depth, part in enumerate(parts)
        if part not in WRAPPED or ".".join(parts[:depth]) not in layers
    )


def _attributes(layer: Any) -> tuple[str, ...]:
    """Where a layer of PEFT holds what it has for each adapter."""
    return (*layer.adapter_layer_names, *layer.other_param_names)


def _held(layer: Any, attribute: str, slot: str) -> Any:
    """What a layer has for an adapter there; None: nothing."""
    holder: Any = reduce(lambda each, name: getattr(each, name, None), attribute.split("."), layer)
    return holder[slot] if hasattr(holder, "keys") and slot in holder else None


def _add_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(_sample(tensor.detach()))


def _sample(tensor: torch.Tensor) -> bytes:
    """A checksum over all bits and some bytes in full: reads each tensor once, copies none."""
    raw = tensor.reshape(-1).view(torch.uint8)
    whole = len(raw) // 8 * 8
    # Added up modulo 2**64, which no order of summation changes.
    total = raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)
    picked = raw[:: max(1, len(raw) // 256)][:256]
    return bytes(total.cpu().numpy().tobytes() + picked.cpu().numpy().tobytes())
