"""KVBoost: language models that do not read again what they have read before.

`KVBoost.from_pretrained(model)` gives an engine; `warm` and `generate` are its main calls.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.core import Sampling
    from kvboost.engine.engine import KVBoost
    from kvboost.engine.paged import CPUPagedEngine
    from kvboost.engine.results import (
        CorrectnessReport,
        GenerationMode,
        GenerationResult,
        ReuseReport,
        WarmResult,
    )
    from kvboost.engine.stream import TextStream
    from kvboost.errors import CacheError, ConfigError, KVBoostError, UnsupportedModel
    from kvboost.models.install import (
        flash_attention_available,
        get_flash_attn_tier,
        install_flash_attention,
        uninstall_flash_attention,
    )

__version__ = "0.1.0"

# Resolved on first use, so that `import kvboost` does not load torch.
_HOMES = {
    "KVBoost": "kvboost.engine.engine",
    "CPUPagedEngine": "kvboost.engine.paged",
    "CorrectnessReport": "kvboost.engine.results",
    "GenerationMode": "kvboost.engine.results",
    "GenerationResult": "kvboost.engine.results",
    "ReuseReport": "kvboost.engine.results",
    "Sampling": "kvboost.core",
    "WarmResult": "kvboost.engine.results",
    "TextStream": "kvboost.engine.stream",
    "CacheError": "kvboost.errors",
    "ConfigError": "kvboost.errors",
    "KVBoostError": "kvboost.errors",
    "UnsupportedModel": "kvboost.errors",
    "flash_attention_available": "kvboost.models.install",
    "get_flash_attn_tier": "kvboost.models.install",
    "install_flash_attention": "kvboost.models.install",
    "uninstall_flash_attention": "kvboost.models.install",
}

__all__ = [
    "CPUPagedEngine",
    "CacheError",
    "ConfigError",
    "CorrectnessReport",
    "GenerationMode",
    "GenerationResult",
    "KVBoost",
    "KVBoostError",
    "ReuseReport",
    "Sampling",
    "TextStream",
    "UnsupportedModel",
    "WarmResult",
    "flash_attention_available",
    "get_flash_attn_tier",
    "install_flash_attention",
    "uninstall_flash_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
