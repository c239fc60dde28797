"""Options of the connector: KVBoost's own, except for what vLLM does itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost import config
from kvboost.config import Options, hint, make_options
from kvboost.errors import ConfigError

OPTIONS = (
    "audit_ratio",
    "cache_secret",
    "cache_url",
    "changed_budget",
    "chunk_size",
    "company",
    "disk_cache_dir",
    "max_cache_bytes",
    "max_chunks",
    "max_disk_bytes",
    "promote",
    "quality_budget",
    "recompute_overlap",
    "recompute_ratio",
    "recompute_strategy",
    "reuse",
    "tenant_quota",
    "tier_deadline_ms",
)
"""Of `kvboost.config.Options`: what `kv_connector_extra_config` may set. vLLM does the rest."""

STRATEGIES = tuple(name for name in config.STRATEGIES if name not in config.MEASURING)
"""Those that choose by the prompt's tokens alone."""


def read_options(values: Mapping[str, Any]) -> Options:
    """`kv_connector_extra_config` as options.

    Raises:
        ConfigError: a name or value is wrong, or of no use inside vLLM.
    """
    for name in values:
        if name not in OPTIONS:
            raise ConfigError(
                f"kv_connector_extra_config: KVBoost has no option {name!r} inside vLLM"
                f"{hint(name, OPTIONS)}"
            )
    strategy = values.get("recompute_strategy", STRATEGIES[0])
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"recompute_strategy={strategy!r}: expected one of {', '.join(STRATEGIES)} inside vLLM"
        )
    return make_options(values)
