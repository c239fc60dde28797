"""KVBoost inside vLLM: `kv_connector_module_path` of its `--kv-transfer-config`.

`KVBoostConnector` is imported when it is asked for, so that what decides here can be used, and
tested, without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost.connectors.vllm.connector import KVBoostConnector

__all__ = ["KVBoostConnector"]


def __getattr__(name: str) -> object:
    if name == "KVBoostConnector":
        from kvboost.connectors.vllm.connector import KVBoostConnector  # noqa: PLC0415

        return KVBoostConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
