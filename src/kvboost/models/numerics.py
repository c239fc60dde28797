"""What decides the last bits of a forward, beside the model and the shapes that it computes in."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
import transformers

from kvboost import __version__
from kvboost.models.fingerprint import hash_tensors
from kvboost.models.processor import cpu_name
from kvboost.weights.stream import streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def numerics(model: PreTrainedModel, *, prepacked: bool) -> bytes:
    """Digest of what must agree, besides the fingerprint, before two runs give equal bits."""
    weights, device = streamed(model), model.device
    is_cuda = device.type == "cuda"
    facts = {
        "kvboost": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_attn": getattr(sys.modules.get("flash_attn"), "__version__", None),
        "attention": model.config._attn_implementation,  # noqa: SLF001
        "experts": getattr(model.config, "_experts_implementation", None),
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "prepacked": prepacked,
        "cut_at_bytes": None if weights is None else weights.limit_bytes,
        "buffers": hash_tensors(_computed_buffers(model)),
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def _computed_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What no checkpoint holds; the fingerprint takes it to rounding only."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}
