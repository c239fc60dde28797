"""The fingerprint of a model from its files, for an engine that runs it without Transformers.

No weights are loaded. docs/adr/0048-name-by-files.md has the rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvboost.core import KVGeometry
from kvboost.errors import UnsupportedModel
from kvboost.models.buffers import compute_buffers
from kvboost.models.certify import cached_tensors, position_limit, rotary_frequencies
from kvboost.models.checkpoint import Checkpoint
from kvboost.models.fingerprint import base_tensors, embeddings, hash_tensors, named_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NUM_LAYERS = 4  # with compared K/V; no known pattern of full-attention layers is longer
PLAIN = {"F16", "BF16", "F32"}  # dtypes of weights that are not quantised


@dataclass(frozen=True)
class Identity:
    """A model's fingerprint, and measurements to compare another engine's K/V with."""

    fingerprint: bytes
    frequencies: frozenset[tuple[float, ...]]  # of its rotary embeddings
    planes: torch.Tensor | None  # [planes, heads, tokens, head_dim] of the probe tokens
    refusal: str = ""  # why Transformers' engine gives it another name


def identify(
    name: str,
    dtype: torch.dtype,
    geometry: KVGeometry,
    probe: Sequence[int],
    kept_in: Path,
    *,
    is_changed: bool = False,
    trust_remote_code: bool = False,
    code_revision: str | None = None,
    **arguments: Any,
) -> Identity:
    """Compute the fingerprint of a model, and run `probe` through its first layers.

    `kept_in`: a folder for the digests of files. `is_changed`: the engine does not run the model as
    its files say. `arguments`: those of the hub.

    Raises:
        UnsupportedModel: engines do not agree on the positions of such a model, or it has no files.
    """
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **code, code_revision=code_revision, **arguments)
    checkpoint = Checkpoint(name, **arguments)
    if trust_remote_code and getattr(config, "auto_map", None):
        revision = code_revision or arguments.get("revision")
        code |= {"code_revision": revision, "cache_dir": arguments.get("cache_dir")}
    model = _empty(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, **code))
    if position_limit(model) is not None:
        raise UnsupportedModel("its rotary embedding changes with the length of a prompt")
    tensors = dict(base_tensors(model))
    absent = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    _, last = embeddings(model)
    if last not in checkpoint.shapes and config.get_text_config().tie_word_embeddings:
        absent.pop(last, None)
    frequencies = frozenset(rotary_frequencies(model))
    refusal = _refusal(config, absent, checkpoint, is_changed=is_changed)
    if refusal:
        # Another rule: its tensors are as they are called and stored in the files.
        contents = checkpoint.digests({}, kept_in)
        fingerprint = sha256(b"files" + named_by(contents, model, geometry)).digest()
        return Identity(fingerprint, frequencies, None, refusal)
    found = checkpoint.digests({name: each.dtype for name, each in absent.items()}, kept_in)
    buffers = {name: each for name, each in tensors.items() if not each.is_meta}
    contents = {name: found[name] for name in absent} | hash_tensors(buffers)
    fingerprint = named_by(contents, model, geometry)
    try:
        planes = _first_planes(model, checkpoint, probe) if probe else None
    except Exception as error:  # foreign code, run in our way
        planes, refusal = None, f"its first layers cannot be run alone: {error}"
    return Identity(fingerprint, frequencies, planes, refusal)


def _empty(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model without memory for its weights."""
    with torch.device("meta"):
        model = make().eval()
    compute_buffers(model)
    return model


def _refusal(
    config: PreTrainedConfig,
    absent: dict[str, torch.Tensor],
    checkpoint: Checkpoint,
    *,
    is_changed: bool,
) -> str:
    if is_changed:
        return "the engine was told to change the model"
    if getattr(config, "quantization_config", None) or not checkpoint.dtypes <= PLAIN:
        return "its checkpoint is quantised"
    for name, tensor in absent.items():
        if checkpoint.shapes.get(name) != list(tensor.shape):
            return f"Transformers converts its checkpoint: {name} is made from other tensors"
    return ""


def _first_planes(
    whole: PreTrainedModel, checkpoint: Checkpoint, probe: Sequence[int]
) -> torch.Tensor:
    """What the first layers cache of `probe`, with no more of the embeddings than its tokens."""
    small = copy.deepcopy(whole.config)
    text = small.get_text_config()
    text.num_hidden_layers = min(NUM_LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    tokens = sorted(set(probe))
    text.vocab_size, text.pad_token_id = len(tokens), None
    model = _empty(lambda: type(whole)._from_config(small, dtype=whole.dtype))  # noqa: SLF001
    state = {}
    for name, tensor in model.state_dict().items():
        if name in checkpoint.shapes:
            is_cut = checkpoint.shapes[name] != list(tensor.shape)
            state[name] = checkpoint.read(name, tokens if is_cut else None).to(tensor.dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    ids = torch.tensor([[tokens.index(token) for token in probe]])
    with torch.no_grad():
        found = dict(cached_tensors(model, ids, range(len(probe))))
    return torch.cat([found[plane] for plane in sorted(found)])
