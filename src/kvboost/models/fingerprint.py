"""The fingerprint: a hash of everything that determines a model's K/V, part of every key.

The rule, which needs no model in memory, is in docs/adr/0034-fingerprint.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvboost.core import KVGeometry
from kvboost.models.buffers import changed_buffers
from kvboost.weights.stream import streamed

# Entries of a config that do not affect K/V. Nor does the tokenizer: K/V depends on token ids.
COSMETIC = ("architectures", "dtype", "id2label", "label2id", "transformers_version", "use_cache")
# The same for adapters: their origin, and settings of their training.
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

PIECE_BYTES = 1 << 23  # read at once
NUM_THREADS = 4  # each hashes a tensor at 1 to 4 GB/s; more would wait for memory or a disk


def fingerprint(model: PreTrainedModel, geometry: KVGeometry) -> bytes:
    """Digest of the weights and buffers as loaded, the settings and the geometry.

    Adapters are no part of it: a model has the same one before and after they are loaded.
    """
    tensors = dict(base_tensors(model))
    weights = streamed(model)
    if weights is None:
        contents = hash_tensors(tensors)
    else:
        tensors = {name: weights.source(tensor) for name, tensor in tensors.items()}
        contents = hash_tensors(tensors, weights.forget)
        weights.reset()
    return named_by(contents, model, geometry)


def named_by(
    contents: Mapping[str, list[Any]], model: PreTrainedModel, geometry: KVGeometry
) -> bytes:
    """The fingerprint of a model with these digests of its tensors."""
    # A checkpoint of tied embeddings has the output embedding or not: the same either way.
    first, last = embeddings(model)
    is_tied = contents.get(first) == contents.get(last)
    counted = {name: each for name, each in contents.items() if not (is_tied and name == last)}
    return _digest(settings=_settings(model), geometry=repr(geometry), tensors=counted)


def embeddings(model: PreTrainedModel) -> tuple[str, str]:
    """The names of the weights of the input and the output embedding."""
    return (
        _weight_of(model, "get_input_embeddings"),
        _weight_of(model, "get_output_embeddings"),
    )


def adapter_digest(model: torch.nn.Module, slot: str) -> bytes:
    """Digest of an adapter's weights and settings, without its name."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415  (an extra)

    config: Any = model.peft_config
    layers = adapter_layers(model).items()
    scaling = {path: layer.scaling.get(slot) for path, layer in layers if hasattr(layer, "scaling")}
    saved = get_peft_model_state_dict(model, adapter_name=slot, save_embedding_layers=False)
    settings = said_by(config[slot].to_dict())
    return _digest(settings=settings, scaling=scaling, tensors=hash_tensors(saved))


def said_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an adapter that affect K/V."""
    settings = {n: each for n, each in config.items() if n not in COSMETIC_OF_ADAPTERS}
    return {n: sorted(each) if isinstance(each, set) else each for n, each in settings.items()}


def adapter_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The layers that PEFT has put into a model, by their paths."""
    found = model.named_modules()
    return {path: layer for path, layer in found if hasattr(layer, "adapter_layer_names")}


def hash_tensors(
    tensors: Mapping[str, torch.Tensor], forget: Callable[[torch.Tensor], None] | None = None
) -> dict[str, list[Any]]:
    """Dtype, shape and BLAKE3 of all bytes of each tensor.

    With `forget`, which is told what was read, one piece is in memory at a time.
    """
    by_size = sorted(tensors.values(), key=lambda tensor: -tensor.nbytes)  # long ones first
    each = {id(tensor): tensor for tensor in by_size}  # tied ones once
    with ThreadPoolExecutor(NUM_THREADS if forget is None else 1) as pool:
        found = pool.map(partial(_hash, forget=forget), each.values())
        digests = dict(zip(each, found, strict=True))
    return {
        name: [_name(tensor.dtype), list(tensor.shape), digests[id(tensor)]]
        for name, tensor in tensors.items()
    }


def described(tensor: torch.Tensor, dtype: torch.dtype) -> list[Any]:
    """What `hash_tensors` finds for a tensor that was converted to `dtype`."""
    return [_name(dtype), list(tensor.shape), _hash(tensor, dtype=dtype)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hash(
    tensor: torch.Tensor,
    forget: Callable[[torch.Tensor], None] | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    digest, flat = blake3(), tensor.detach().reshape(-1)
    step = PIECE_BYTES // flat.element_size()
    for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        digest.update(piece.to(dtype or piece.dtype).view(torch.uint8).cpu().numpy().data)
        if forget is not None:
            forget(piece)
    return digest.hexdigest()


def _digest(**parts: Any) -> bytes:
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """The entries of a config that affect K/V."""
    settings = {
        name: value
        for name, value in model.config.get_text_config().to_dict().items()
        if name not in COSMETIC and not name.startswith("_")
    }
    if settings.get("quantization_config"):  # the weights of a GGUF file count, not where it lies
        quantization = dict(settings["quantization_config"])
        quantization.pop("gguf_file", None)
        settings["quantization_config"] = quantization
    return settings


def base_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that determine K/V, adapters left out, under their names in the base model.

    That is what a checkpoint of it holds, and buffers that no longer follow from the config.
    """
    layers = adapter_layers(model)
    added = [
        f"{path}.{name}."
        for path, layer in layers.items()
        for name in (*layer.adapter_layer_names, *layer.other_param_names)
    ]
    for name, tensor in [*model.state_dict(keep_vars=True).items(), *changed_buffers(model)]:
        if not name.startswith(tuple(added)):
            yield (WRAPPED.sub("", name) if layers else name), tensor


def _weight_of(model: PreTrainedModel, getter: str) -> str:
    """The name of the weight of an embedding."""
    wanted = getattr(model, getter)()
    found = (f"{path}.weight" for path, module in model.named_modules() if module is wanted)
    return next(found, "")
