"""Counters of the connector on vLLM's own Prometheus endpoint and in its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvboost.connectors.vllm.counted import COUNTED, PREFIX
from kvboost.metrics import NAMES


class KVBoostStats(KVConnectorStats):
    """Counts since the last step, by the names of `kvboost.metrics`."""

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> KVBoostStats | None:
        """The non-zero counts, or None if there are none."""
        data = {name: counts[name] for name in COUNTED if counts.get(name)}
        return cls(data=data) if data else None

    def reset(self) -> None:
        """Reset to no counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another side or rank."""
        return KVBoostStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {f"kvboost_{name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KVBoostPromMetrics(KVConnectorPromMetrics):
    """A counter for each name."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name in COUNTED:
            counter = self._counter_cls(
                name=f"{PREFIX}{name}", documentation=NAMES[name], labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
