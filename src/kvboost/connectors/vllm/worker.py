"""vLLM's worker with its model handed to the connector: `--worker-cls` for moved text.

A connector is given the K/V blocks but not the model, which repairing moved text needs. A worker
class of one's own is vLLM's way to reach it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvboost.connectors.vllm.connector import KVBoostConnector

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class KVBoostWorker(Worker):
    """The worker of the platform."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Set up the K/V blocks, then let the connector see the model that fills them."""
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, KVBoostConnector):
            connector.attach_model(self.get_model())
