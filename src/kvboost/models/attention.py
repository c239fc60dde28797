"""The attention and mask functions that Transformers calls while our cache is in use.

They change two things against Transformers' own: masks honour the positions of scattered queries
(see `SlotCache.get_query_offset`), and on CPU, where Transformers follows rules made for CUDA,
neither K/V heads nor the causal mask of appended tokens are written out in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from kvboost.models.cascade import attend_appended
from kvboost.models.packed import MaskOne, PackedMask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SDPA, EAGER = "kvboost_sdpa", "kvboost_eager"

# Up to here one kernel with a small mask is faster than two without (measured on AVX-512 and AMX).
FEW_QUERIES = 64

# Scattered queries are computed in blocks of this size, each over the keys that it can see.
BLOCK_QUERIES = 64


Observer = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], None]
"""Called with an attention module, its queries and all visible keys."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let `observer` see what each layer's attention gets, in this thread."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def counterpart(model: PreTrainedModel) -> str:
    """Our implementation for a model: eager where SDPA would drop its soft-caps or sinks."""
    is_eager = model.config._attn_implementation == "eager"  # noqa: SLF001
    return EAGER if is_eager or not model._supports_sdpa else SDPA  # noqa: SLF001


def register() -> None:
    """Make both implementations known to Transformers. May be called again."""
    AttentionInterface.register(SDPA, _sdpa_attention)
    AttentionMaskInterface.register(SDPA, _sdpa_mask)
    AttentionInterface.register(EAGER, _eager_attention)
    AttentionMaskInterface.register(EAGER, _eager_mask)


def _sdpa_mask(**kwargs: Any) -> torch.Tensor | PackedMask | None:
    batch = getattr(kwargs.get("q_offset"), "kvboost_batch", None)
    if batch is None:
        return _mask_one(**kwargs)
    on_cpu = torch.device(kwargs.get("device", "cpu")).type == "cpu"
    is_plain = kwargs.get("local_size") is None and kwargs.get("allow_is_causal_skip", True)
    return PackedMask(batch, _for_one(_mask_one, kwargs), joins=on_cpu and is_plain)


def _eager_mask(**kwargs: Any) -> torch.Tensor | PackedMask | None:
    batch = getattr(kwargs.get("q_offset"), "kvboost_batch", None)
    if batch is None:
        mask: torch.Tensor | None = eager_mask(**kwargs)
        return mask
    return PackedMask(batch, _for_one(eager_mask, kwargs), joins=False)


def _for_one(make_mask: Callable[..., torch.Tensor | None], kwargs: dict[str, Any]) -> MaskOne:
    """`make_mask` for one sequence of a packed row."""

    def mask_one(
        q_length: int, kv_length: int, q_offset: int | torch.Tensor
    ) -> torch.Tensor | None:
        sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        return make_mask(**(kwargs | sizes))

    return mask_one


def _mask_one(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> torch.Tensor | None:
    """None where every query sees exactly the rows up to its own, the last query all of them."""
    on_cpu = torch.device(device).type == "cpu"
    is_scattered = isinstance(q_offset, torch.Tensor)
    if on_cpu and allow_is_causal_skip and not is_scattered:
        is_appended = q_offset + q_length == kv_length
        is_windowed = local_size is not None and kv_length >= local_size
        is_padded = attention_mask is not None and not bool(attention_mask.all())
        is_cheap = q_length == 1 or q_offset == 0 or q_length > FEW_QUERIES
        if is_appended and is_cheap and not is_windowed and not is_padded:
            return None
    mask: torch.Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        # Transformers also skips the mask for a lone query, or for as many queries as rows:
        # right for appended tokens, wrong for scattered ones.
        allow_is_causal_skip=allow_is_causal_skip and not (on_cpu or is_scattered),
        device=device,
        **kwargs,
    )
    if mask is None or not on_cpu:
        return mask
    # The CPU kernel adds a mask of numbers; given booleans it converts them in every layer.
    mask = _additive(mask, dtype)
    if isinstance(q_offset, torch.Tensor):
        mask.kvboost_blocks = _blocks(q_offset + torch.arange(q_length))  # type: ignore[attr-defined]
    return mask


def _sdpa_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedMask | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(attention_mask, PackedMask):
        return _attend_packed(_sdpa_attention, module, query, attention_mask, kwargs), None
    _show(module, query, key)
    special = [name for name in ("position_bias", "is_causal") if kwargs.get(name) is not None]
    if query.device.type != "cpu" or special or not getattr(module, "is_causal", True):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    scale, num_past = kwargs.get("scaling"), key.shape[2] - query.shape[2]
    blocks: Sequence[tuple[int, int, int]] = getattr(attention_mask, "kvboost_blocks", ())
    if attention_mask is None and num_past > 0 and query.shape[2] > 1:
        output = _appended(query, key, value, scale)
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal attention of the last tokens over all rows, without a mask where that is possible."""
    if key.shape[-1] != value.shape[-1]:  # no flash kernel: MLA
        rows = torch.arange(key.shape[2])
        own = torch.arange(key.shape[2] - query.shape[2], key.shape[2])
        mask = _additive(rows <= own[:, None], query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    output, _ = attend_appended(query, key, value, scale)
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
