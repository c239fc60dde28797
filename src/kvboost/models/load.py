"""A name or folder -> model and tokenizer, with Transformers' own loaders."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvboost.errors import ConfigError
from kvboost.models import gguf
from kvboost.models.adapters import num_embeddings
from kvboost.weights.awq import use_own_awq
from kvboost.weights.stream import stream_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Arguments of Transformers' from_pretrained; anything else is taken for a mistyped option.
SHARED = (
    "cache_dir",
    "force_download",
    "gguf_file",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
MODEL_ONLY = (
    "attn_implementation",
    "code_revision",
    "config",
    "device_map",
    "dtype",
    "experts_implementation",
    "ignore_mismatched_sizes",
    "key_mapping",
    "max_memory",
    "offload_buffers",
    "offload_folder",
    "quantization_config",
    "state_dict",
    "tp_plan",
    "tp_size",
    "use_kernels",
    "use_safetensors",
    "variant",
    "weights_only",
)


def load(
    name: str,
    device: str | torch.device | None,
    arguments: dict[str, Any],
    max_weight_bytes: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load both; the model goes to `device`, or else to a GPU if there is one.

    `name` may be the path of a GGUF file. With `max_weight_bytes` only that much of the weights is
    there at a time.
    """
    if max_weight_bytes is not None and "device_map" in arguments:
        raise ConfigError("max_weight_bytes and device_map both say where weights are: give one")
    name, arguments = gguf.split_path(name, arguments)
    shared = {key: value for key, value in arguments.items() if key in SHARED}
    tokenizer = AutoTokenizer.from_pretrained(name, **shared)
    # Transformers' own way to AWQ rearranges the weights, and wants that package.
    if max_weight_bytes is not None or not find_spec("gptqmodel"):
        arguments = arguments | _own_awq(name, arguments, shared)
    model = AutoModelForCausalLM.from_pretrained(name, **arguments)
    if arguments.get("gguf_file"):
        gguf.follow(name, shared, model, tokenizer)
    target = device or ("cuda" if torch.cuda.is_available() else None)
    if max_weight_bytes is not None:
        stream_weights(model, max_weight_bytes, target or "cpu")
    elif target is not None and "device_map" not in arguments:
        model = model.to(target)
    return model, tokenizer


def _own_awq(name: str, arguments: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """What to load a checkpoint with if it is an AWQ one."""
    if "config" in arguments or arguments.get("gguf_file"):
        return {}
    config = AutoConfig.from_pretrained(name, **shared)
    return {"config": config} if use_own_awq(config) else {}


def limits(model: PreTrainedModel) -> tuple[int, int | None]:
    """The size of a model's vocabulary, and the most tokens that it reads, if it says so."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return num_embeddings(model), longest


def boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end a line or a sentence."""
    ids = sorted(tokenizer.get_vocab().values())
    texts = tokenizer.batch_decode([[token] for token in ids])
    ends = ("\n", ".", "!", "?")
    return frozenset(token for token, text in zip(ids, texts, strict=True) if text.endswith(ends))
