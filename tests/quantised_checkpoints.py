"""Writes AWQ and GPTQ checkpoints: packers that follow the published layouts, word by word."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ

Quantise = Callable[[torch.Tensor, int], dict[str, torch.Tensor]]


def pack(numbers: torch.Tensor, column_of_nibble: Sequence[int]) -> torch.Tensor:
    """[rows, columns] of 0..15 -> int32 [rows, columns / 8]."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate(column_of_nibble):
        words |= numbers[:, column::8].long() << (4 * nibble)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantise_awq(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """Pack a weight [out, in] in groups of inputs; `dense` is what the packed tensors stand for."""
    columns = weight.t().float().reshape(-1, group_size, weight.shape[0])  # [groups, size, out]
    low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (columns / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    dense = (numbers - zeros[:, None]) * scales.float()[:, None]
    return {
        "qweight": pack(numbers.flatten(0, 1), COLUMN_OF_NIBBLE),
        "qzeros": pack(zeros, COLUMN_OF_NIBBLE),
        "scales": scales,
        "dense": dense.flatten(0, 1).t().contiguous(),
    }


def quantise_gptq(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """The same for GPTQ, symmetric: words run along the inputs, zeros are stored less one."""
    columns = weight.t().float().reshape(-1, group_size, weight.shape[0])
    scales = (columns.abs().amax(1) / 7).clamp(min=1e-5).half()
    numbers = (columns / scales.float()[:, None] + 8).round().clamp(0, 15)
    dense = (numbers - 8) * scales.float()[:, None]
    return {
        "qweight": pack(numbers.flatten(0, 1).t(), range(8)).t().contiguous(),
        "qzeros": pack(torch.full_like(scales, 8 - 1), range(8)),
        "scales": scales,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group_size,
        "dense": dense.flatten(0, 1).t().contiguous(),
    }


def save_awq(model: PreTrainedModel, folder: Path, group_size: int) -> PreTrainedModel:
    """Write `model` as an AWQ checkpoint; what it stands for is put into `model` itself."""
    settings = {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    return _save(model, folder, quantise_awq, group_size, settings)


def save_gptq(model: PreTrainedModel, folder: Path, group_size: int) -> PreTrainedModel:
    """Write `model` as a GPTQ checkpoint; what it stands for is put into `model` itself."""
    settings = {"quant_method": "gptq", "sym": True, "desc_act": False}
    return _save(model, folder, quantise_gptq, group_size, settings)


def _save(
    model: PreTrainedModel,
    folder: Path,
    quantise: Quantise,
    group_size: int,
    settings: dict[str, object],
) -> PreTrainedModel:
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            packed = quantise(module.weight.data, group_size)
            module.weight.data = packed.pop("dense").to(module.weight.dtype)
            tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    skipped = {f"{key.rpartition('.')[0]}.weight" for key in tensors}
    plain = {name: tensor for name, tensor in model.state_dict().items() if name not in skipped}
    if model.config.tie_word_embeddings:
        plain.pop("lm_head.weight", None)
    save_file(tensors | plain, folder / "model.safetensors", metadata={"format": "pt"})
    quantisation = {"bits": 4, "group_size": group_size, **settings}
    config = model.config.to_dict() | {"quantization_config": quantisation}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    return model
