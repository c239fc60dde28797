"""The attention that a model runs with: chosen by capability, installed, and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import torch

from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models import attention, kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The attention that models had before `install_flash_attention`.
_native: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
in_engines: WeakSet[PreTrainedModel] = WeakSet()


def get_flash_attn_tier(device: str | torch.device | None = None) -> str:
    """The fastest attention that runs on a device: "flash_attn", "flash_sdpa" or "sdpa".

    Args:
        device: "cpu", "cuda" ...; default: a GPU if there is one.

    Example:
        >>> from kvboost import get_flash_attn_tier
        >>> get_flash_attn_tier("cpu")
        'flash_sdpa'
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    return next(tier for tier in kernels.TIERS if not kernels.tier_refusal(tier, where))


def flash_attention_available(device: str | torch.device | None = None) -> bool:
    """Whether a device has flash attention kernels.

    Args:
        device: "cpu", "cuda" ...; default: a GPU if there is one.

    Example:
        >>> from kvboost import flash_attention_available
        >>> flash_attention_available("cpu")
        True
    """
    return get_flash_attn_tier(device) != "sdpa"


def install_flash_attention(model: PreTrainedModel, tier: str | None = None) -> str:
    """Run a Transformers model with KVBoost's attention, without an engine; for inference.

    An engine created later keeps the tier. Call it again to change the tier.

    Args:
        model: A causal language model of Transformers.
        tier: "flash_attn", "flash_sdpa" or "sdpa"; default: the fastest that runs here.

    Returns:
        The tier in use.

    Raises:
        ConfigError: The tier is unknown or cannot run here, or an engine uses the model.
        UnsupportedModel: The model's attention cannot be replaced.

    Example:
        >>> from kvboost import install_flash_attention, uninstall_flash_attention
        >>> install_flash_attention(model, tier="sdpa")
        'sdpa'
        >>> uninstall_flash_attention(model)
    """
    _refuse_engines(model)
    if tier is not None and tier not in kernels.TIERS:
        raise ConfigError(f"tier={tier!r}: expected one of {', '.join(kernels.TIERS)}")
    if attention.needs_eager(model):
        raise ConfigError("its attention is eager: flash kernels would drop soft-caps and sinks")
    for chosen in kernels.TIERS if tier is None else (tier,):
        reason = _refusal(chosen, model)
        if not reason:
            break
    else:
        raise ConfigError(f"tier={chosen!r} cannot run here: {reason}")
    native = model.config._attn_implementation  # noqa: SLF001
    switch(model, attention.IMPLEMENTATIONS[chosen])
    _native.setdefault(model, native)
    return chosen


def uninstall_flash_attention(model: PreTrainedModel) -> None:
    """Restore a model's own attention; undoes `install_flash_attention`.

    Args:
        model: A causal language model of Transformers.

    Raises:
        ConfigError: An engine uses the model: close it first.

    Example:
        >>> from kvboost import install_flash_attention, uninstall_flash_attention
        >>> own = model.config._attn_implementation
        >>> tier = install_flash_attention(model)
        >>> uninstall_flash_attention(model)
        >>> model.config._attn_implementation == own
        True
    """
    _refuse_engines(model)
    native = _native.pop(model, None)
    if native is not None:
        model.set_attn_implementation(native)


def own_attention(model: PreTrainedModel) -> str | None:
    """The attention that a model came with."""
    current: str | None = model.config._attn_implementation  # noqa: SLF001
    return _native.get(model, current)


def implementations(model: PreTrainedModel) -> list[str]:
    """The implementations that an engine may run a model with, best first."""
    current = model.config._attn_implementation  # noqa: SLF001
    if current in attention.IMPLEMENTATIONS.values():  # installed, not left to us
        return [current]
    if attention.needs_eager(model):
        return [attention.EAGER]
    tiers = [tier for tier in kernels.TIERS if not _refusal(tier, model)]
    return [attention.IMPLEMENTATIONS[tier] for tier in tiers]


def switch(model: PreTrainedModel, implementation: str) -> None:
    """Switch a model to one of our implementations.

    Raises:
        UnsupportedModel: its attention cannot be replaced.
    """
    attention.register()
    try:
        model.set_attn_implementation(implementation)
    except ValueError as error:
        raise UnsupportedModel(f"its attention cannot be replaced: {error}") from error
    if model.config._attn_implementation != implementation:  # noqa: SLF001
        raise UnsupportedModel("its attention cannot be replaced")


def _refuse_engines(model: PreTrainedModel) -> None:
    if model in in_engines:
        raise ConfigError("an engine uses the model: close it first")


def _refusal(tier: str, model: PreTrainedModel) -> str:
    if tier == "flash_attn" and not model._supports_flash_attn:  # noqa: SLF001
        return "the model does not support it"
    return kernels.tier_refusal(tier, model.device, model.dtype)
