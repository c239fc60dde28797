"""What decides the last bits of a forward besides model and shapes; facts about the CPU."""

from __future__ import annotations

import json
import platform
import sys
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from kvboost import __version__
from kvboost.models.fingerprint import hash_tensors
from kvboost.weights.stream import streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INFO = Path("/proc/cpuinfo")
# Of x86 and of Arm. torch.ops.mkldnn says yes where AVX-512 has to emulate them.
BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}


def product_precision() -> str:
    """How torch rounds the factors of products in single precision, in its older words."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set in the newer words, which are for a back end each
        found = {
            each.matmul.fp32_precision for each in (torch.backends.cuda, torch.backends.mkldnn)
        }
        return "medium" if "bf16" in found else "high" if "tf32" in found else "highest"


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
        "matmul": product_precision(),
        "prepacked": prepacked,
        "cut_at_bytes": None if weights is None else weights.limit_bytes,
        "buffers": hash_tensors(_computed_buffers(model)),
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def _computed_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that no checkpoint holds; the fingerprint ignores their rounding."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def cpu_name() -> str:
    """Name of the CPU: libraries choose kernels and block sizes by it."""
    return _told("model name") or platform.processor()


def has_bfloat16() -> bool:
    """Whether the CPU has bfloat16 instructions; also true where that is not known, as on Macs."""
    told = _told("flags") or _told("Features")
    if told:
        return not BFLOAT16.isdisjoint(told.split())
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001


def _told(name: str) -> str:
    """The first line of this name in Linux's description of the CPU."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")
