"""A name or folder -> model and tokenizer, with Transformers' own loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.models import gguf

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
    name: str, device: str | torch.device | None, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load both; the model goes to `device`, or else to a GPU if there is one.

    `name` may be the path of a GGUF file.
    """
    name, arguments = gguf.split_path(name, arguments)
    shared = {key: value for key, value in arguments.items() if key in SHARED}
    tokenizer = AutoTokenizer.from_pretrained(name, **shared)
    model = AutoModelForCausalLM.from_pretrained(name, **arguments)
    if arguments.get("gguf_file"):
        gguf.follow(name, shared, model, tokenizer)
    target = device or ("cuda" if torch.cuda.is_available() else None)
    if target is not None and "device_map" not in arguments:
        model = model.to(target)
    return model, tokenizer


def limits(model: PreTrainedModel) -> tuple[int, int | None]:
    """The size of a model's vocabulary, and the most tokens that it reads, if it says so."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return model.get_input_embeddings().num_embeddings, longest


def boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end a line or a sentence."""
    ids = sorted(tokenizer.get_vocab().values())
    texts = tokenizer.batch_decode([[token] for token in ids])
    ends = ("\n", ".", "!", "?")
    return frozenset(token for token, text in zip(ids, texts, strict=True) if text.endswith(ends))
