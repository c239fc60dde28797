"""The attention and mask functions that Transformers calls while our cache is in use.

They differ from Transformers' own in two ways. Masks honour the positions of scattered queries (see
`packed.Segment.offset`). The causal mask of appended tokens is not materialised, nor are repeated
K/V heads on CPUs, where Transformers follows rules made for CUDA. There is one implementation for
each tier of kernels (`kernels.TIERS`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from kvboost.models import kernels, varlen
from kvboost.models.cascade import attend_appended
from kvboost.models.packed import MaskOne, PackedMask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EAGER = "kvboost_eager"
# By tier. Transformers takes every name with "flash" in it for one of its own.
IMPLEMENTATIONS = {
    "flash_attn": "kvboost_package",
    "flash_sdpa": "kvboost_sdpa",
    "sdpa": "kvboost_plain",
}

# Up to here one kernel with a small mask is faster than two without (measured on AVX-512 and AMX).
FEW_QUERIES = 64

# Scattered queries are computed in blocks of this size, each over the keys that it can see.
BLOCK_QUERIES = 64


Observer = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], None]
"""Called with an attention module, its queries and all visible keys."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Show `observer` the inputs of each layer's attention, in this thread."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def needs_eager(model: PreTrainedModel) -> bool:
    """Whether SDPA and flash kernels would drop its soft-caps or sinks."""
    is_eager = model.config._attn_implementation == "eager"  # noqa: SLF001
    return is_eager or not model._supports_sdpa  # noqa: SLF001


def register() -> None:
    """Register all implementations with Transformers; idempotent."""
    for tier, name in IMPLEMENTATIONS.items():
        attention = _plain_attention if tier == "sdpa" else partial(_attention, tier)
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, partial(_mask, tier))
    AttentionInterface.register(EAGER, _eager_attention)
    AttentionMaskInterface.register(EAGER, _eager_mask)


def _mask(tier: str, **kwargs: Any) -> torch.Tensor | BlockMask | PackedMask | None:
    batch = getattr(kwargs.get("q_offset"), "kvboost_batch", None)
    mask_one = partial(_mask_one, tier)
    if batch is None:
        return mask_one(**kwargs)
    pool, local_size = batch.segments[0].rows.pool, kwargs.get("local_size")
    window = local_size if _is_window(kwargs) else None
    if pool.device.type == "cpu":
        joins = local_size is None
    else:
        joins = varlen.fits(pool) and local_size == window
    joins = joins and kwargs.get("allow_is_causal_skip", True) and tier != "sdpa"
    return PackedMask(batch, _for_one(mask_one, kwargs), joins=joins, window=window)


def _is_window(asked: dict[str, Any]) -> bool:
    """Whether a local mask is a sliding window rather than chunks."""
    local_size = asked.get("local_size")
    window = getattr(asked.get("config"), "sliding_window", None)
    return local_size is not None and local_size == window


def _eager_mask(**kwargs: Any) -> torch.Tensor | PackedMask | None:
    batch = getattr(kwargs.get("q_offset"), "kvboost_batch", None)
    if batch is None:
        mask: torch.Tensor | None = eager_mask(**kwargs)
        return mask
    return PackedMask(batch, _for_one(eager_mask, kwargs), joins=False)


def _for_one(make_mask: Callable[..., Any], kwargs: dict[str, Any]) -> MaskOne:
    """`make_mask` for one sequence of a packed row."""

    def mask_one(q_length: int, kv_length: int, q_offset: int | torch.Tensor) -> Any:
        sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        return make_mask(**(kwargs | sizes))

    return mask_one


def _mask_one(tier: str, **kwargs: Any) -> torch.Tensor | BlockMask | None:
    """The mask; None if every query sees all rows up to its own, and the last one all rows."""
    offset, num_queries = kwargs.get("q_offset", 0), kwargs["q_length"]
    device = torch.device(kwargs.get("device", "cpu"))
    on_cpu, is_scattered = device.type == "cpu", isinstance(offset, torch.Tensor)
    if not is_scattered and _sees_all_before(tier, on_cpu, kwargs):
        return None
    if is_scattered and device not in kernels.flex_refusals and _takes_flex(tier, on_cpu, kwargs):
        rule = kwargs.get("mask_function", causal_mask_function)
        positions = offset + torch.arange(num_queries, device=device)
        return kernels.scattered_mask(rule, positions, kwargs["kv_length"])
    # Transformers also skips the mask for a lone query, or for as many queries as rows: right for
    # appended tokens, wrong for scattered ones.
    may_skip = kwargs.get("allow_is_causal_skip", True) and not (on_cpu or is_scattered)
    mask: torch.Tensor | None = sdpa_mask(**kwargs | {"allow_is_causal_skip": may_skip})
    if mask is None or not on_cpu:
        return mask
    # The CPU kernel adds a mask of numbers; given booleans it converts them in every layer.
    mask = _additive(mask, kwargs.get("dtype", torch.float32))
    if is_scattered:
        mask.kvboost_blocks = _blocks(offset + torch.arange(num_queries))  # type: ignore[attr-defined]
    return mask


def _sees_all_before(tier: str, on_cpu: bool, asked: dict[str, Any]) -> bool:  # noqa: FBT001
    """Whether queries are appended and causal, and the tier can do that without a mask."""
    num_queries, num_keys, offset = asked["q_length"], asked["kv_length"], asked.get("q_offset", 0)
    if offset + num_queries != num_keys or not asked.get("allow_is_causal_skip", True):
        return False
    local_size = asked.get("local_size")
    # The package's kernel has windows, not chunks: attention modules tell it their window.
    takes_local = tier == "flash_attn" and _is_window(asked)
    if local_size is not None and num_keys >= local_size and not takes_local:
        return False
    if num_queries > 1 and offset > 0:
        is_small = tier == "flash_sdpa" and on_cpu and num_queries <= FEW_QUERIES
        if tier == "sdpa" or is_small:
            return False
    return not _is_padded(asked.get("attention_mask"))


def _takes_flex(tier: str, on_cpu: bool, asked: dict[str, Any]) -> bool:  # noqa: FBT001
    """Whether to use FlexAttention for queries at these offsets."""
    has_flex = tier == "flash_attn" or (tier == "flash_sdpa" and not on_cpu)
    # An offset without a dimension is that of a static cache of Transformers.
    is_ours = asked["q_offset"].ndim == 1 and asked["q_length"] >= kernels.FLEX_QUERIES
    return has_flex and is_ours and not _is_padded(asked.get("attention_mask"))


def _is_padded(attention_mask: torch.Tensor | None) -> bool:
    return attention_mask is not None and not bool(attention_mask.all())


def _plain_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    with kernels.without_flash():
        return _attention("sdpa", *args, **kwargs)


def _attention(
    tier: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | PackedMask | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(attention_mask, PackedMask):
        attention = partial(_attention, tier)
        return _attend_packed(attention, module, query, attention_mask, kwargs), None
    _show(module, query, key)
    theirs: partial[tuple[torch.Tensor, None]] = partial(
        sdpa_attention_forward, module, query, key, value, attention_mask, **kwargs
    )
    special = [name for name in ("position_bias", "is_causal") if kwargs.get(name) is not None]
    if special or not getattr(module, "is_causal", True):
        return theirs()
    scale, num_past = kwargs.get("scaling"), key.shape[2] - query.shape[2]
    window = kwargs.get("sliding_window") if tier == "flash_attn" else None
    blocks: Sequence[tuple[int, int, int]] = getattr(attention_mask, "kvboost_blocks", ())
    if isinstance(attention_mask, BlockMask):
        output = kernels.attend_scattered(query, key, value, attention_mask, scale)
    elif tier == "flash_attn" and attention_mask is None and kernels.fits_package(query, value):
        return kernels.attend_package(query, key, value, scale, window), None
    elif attention_mask is None and (window or (num_past > 0 and query.shape[2] > 1)):
        output = _appended(query, key, value, scale, window)
    elif query.device.type != "cpu":
        return theirs()
    elif attention_mask is not None and len(blocks) > 1:
        output = _in_blocks(query, key, value, attention_mask, blocks, scale)
    else:
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=kwargs.get("dropout", 0.0),
            scale=scale,
            is_causal=attention_mask is None and query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output.transpose(1, 2).contiguous(), None


def _blocks(positions: torch.Tensor) -> list[tuple[int, int, int]]:
    """Queries in blocks (start, stop, keys that any of them sees), if they are in order."""
    if bool((positions.diff() < 0).any()):
        return []
    starts = range(0, len(positions), BLOCK_QUERIES)
    stops = [min(start + BLOCK_QUERIES, len(positions)) for start in starts]
    return [(a, b, int(positions[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)]


def _in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    blocks: Sequence[tuple[int, int, int]],
    scale: float | None,
) -> torch.Tensor:
    """Attention of scattered queries, without the keys that come after them."""
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, :num_keys],
            value[:, :, :num_keys],
            attn_mask=mask[:, :, start:stop, :num_keys],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, stop, num_keys in blocks
    ]
    return torch.cat(parts, dim=2)


def _appended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: Any
) -> torch.Tensor:
    """Causal attention of the last tokens over all rows, without a mask where that is possible."""
    if window is not None or key.shape[-1] != value.shape[-1]:  # no flash kernel: MLA
        rows = torch.arange(key.shape[2], device=key.device)
        own = rows[-query.shape[2] :, None]
        mask = _additive((rows <= own) & (rows > own - (window or len(rows))), query.dtype)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    if query.device.type != "cpu":
        return kernels.attend_lower_right(query, key, value, scale)
    first = key.shape[2] - query.shape[2]
    past, last = (key[:, :, :first], value[:, :, :first]), (key[:, :, first:], value[:, :, first:])
    output, _ = attend_appended(query, [past], last, scale)
    return output.to(query.dtype)


def _attend_packed(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: PackedMask,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    def attend_one(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return attention(module, query, key, value, mask, **kwargs)[0]

    layer: Any = module.layer_idx
    return mask.attend(layer, query, kwargs.get("scaling"), attend_one).contiguous()


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedMask | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The modeling file's own eager function: it knows soft-caps and sinks."""
    if isinstance(attention_mask, PackedMask):
        return _attend_packed(_eager_attention, module, query, attention_mask, kwargs), None
    _show(module, query, key)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    result: tuple[torch.Tensor, torch.Tensor | None] = eager(
        module, query, key, value, attention_mask, **kwargs
    )
    return result


def _show(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
    observer = _observer.get()
    if observer is not None:
        observer(module, query, key)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """True -> 0, False -> the lowest number."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )
