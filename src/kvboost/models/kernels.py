"""Third-party attention kernels: which run on a device, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

TIERS = ("flash_attn", "flash_sdpa", "sdpa")  # best first

HALVES = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # of the flash_attn package

# Below, torch takes FlexAttention's decoding kernel, which some versions do not have for all
# numbers of heads (pytorch issue 151359, PR 185349); and the mask that it would save is small.
FLEX_QUERIES = 128

flex_refusals: dict[torch.device, str] = {}
"""Devices where FlexAttention failed, and why: scattered queries get masks there."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, position of the query, position of the key) -> whether it is seen."""


def tier_refusal(tier: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """Why a tier cannot run on a device (with a dtype), or an empty string."""
    if tier == "sdpa" or (tier == "flash_sdpa" and device.type == "cpu"):
        return ""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "it needs a GPU of compute capability 8.0, this one has {}.{}".format(*capability)
    if dtype is not None and dtype not in HALVES:
        return f"it needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if tier == "flash_attn" and _package() is None:
        return "the package flash_attn cannot be imported"
    return ""


def fits_package(query: Tensor, value: Tensor) -> bool:
    """Whether the flash_attn package takes tensors of this dtype and width."""
    width = query.shape[-1]
    return query.dtype in HALVES and width == value.shape[-1] <= WIDEST_HEAD and width % 8 == 0


def attend_package(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention of the last tokens over all rows [batch, queries, heads, head_dim]."""
    kernel = _package()
    assert kernel is not None
    inputs = (each.transpose(1, 2) for each in (query, key, value))
    sizes = (-1, -1) if window is None else (window - 1, 0)
    # Causal to the last query since 2.1; `window_size` came with 2.3.
    output: Tensor = kernel(*inputs, softmax_scale=scale, causal=True, window_size=sizes)
    return output


def attend_lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last tokens over all rows by torch; no mask where it has flash."""
    mask, grouped = causal_lower_right(query.shape[2], key.shape[2]), query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def scattered_mask(mask_function: MaskFunction, positions: Tensor, num_keys: int) -> BlockMask:
    """A mask of queries at any positions, as a rule for FlexAttention instead of a tensor."""

    def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, positions[query], key)

    place, compiled = positions.device, positions.is_cuda
    sizes = (None, None, len(positions), num_keys)  # the same for all sequences and heads
    return create_block_mask(is_seen, *sizes, device=place, _compile=compiled)


def attend_scattered(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None
) -> Tensor:
    """Attention under a `scattered_mask`."""
    attend: Any = _compiled_flex() if query.is_cuda else flex_attention
    grouped = query.shape[1] != key.shape[1]
    output: Tensor = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return output


@contextmanager
def without_flash() -> Iterator[None]:
    """Keep torch from its flash kernels, in the whole process while this lasts."""
    was_enabled = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_flash_sdp(False)  # noqa: FBT003 (CPU kernels obey it too)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(was_enabled)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _package() -> Callable[..., Any] | None:
    try:
        kernel: Callable[..., Any] = import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError):  # also where it was built for another torch
        return None
    return kernel
