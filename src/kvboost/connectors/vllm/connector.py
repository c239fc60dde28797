"""vLLM's KV connector interface (V1) -> the two sides."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.models.utils import extract_layer_index

from kvboost.build import build_repairs
from kvboost.connectors.vllm.messages import Facts, Report, StepWork
from kvboost.connectors.vllm.options import read_options
from kvboost.connectors.vllm.scheduler_side import SchedulerSide
from kvboost.connectors.vllm.start import Start
from kvboost.connectors.vllm.stats import KVBoostPromMetrics, KVBoostStats
from kvboost.connectors.vllm.worker_side import WorkerSide
from kvboost.errors import ConfigError, UnsupportedModel, reason_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)


def _log_like_vllm() -> None:
    """Send our log lines to vLLM's handlers; it shows no other logger."""
    ours, theirs = logging.getLogger("kvboost"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.getEffectiveLevel())


def _told(error: Exception) -> str:
    """The reason as text; an unexpected error is also logged with its traceback."""
    if not isinstance(error, UnsupportedModel) or error.__cause__ is not None:
        log.warning("unexpected error in KVBoost; vLLM continues without it", exc_info=error)
    return reason_of(error)


class StepMetadata(KVConnectorMetadata):
    """Work for the workers, as vLLM's metadata."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A worker's facts, as vLLM's metadata."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts


class WorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's report, as vLLM's metadata; ranks after the first send less."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The first rank's, with what failed and what was prefetched on others."""
        assert isinstance(other, WorkerMetadata)
        self.report.failed += other.report.failed
        self.report.prefetched += other.report.prefetched
        return self


class KVBoostConnector(KVConnectorBase_V1):
    """Reuse of K/V from shared tiers, and of moved text, inside vLLM."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError for an option that is unknown, wrong, or of no use here."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._repairs = build_repairs(self._options)
        self._start = Start(vllm_config, kv_cache_config, self._options)
        self._worker: WorkerSide | None = None
        self._refusal = self._move_refusal = ""
        self._counted: Counter[str] = Counter()
        self._scheduler: SchedulerSide | None = None
        if self._kv_transfer_config.kv_role != "kv_both":
            raise ConfigError(f"kv_role={self._kv_transfer_config.kv_role!r}: expected 'kv_both'")
        if role is KVConnectorRole.SCHEDULER:
            # vLLM's default fails requests whose K/V cannot be loaded.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            hash_block = getattr(kv_cache_config, "hash_block_size", None)  # from 0.32 on
            hash_block = hash_block or vllm_config.cache_config.block_size
            self._scheduler = SchedulerSide(
                self._options, self._repairs, self._blocks_of, hash_block
            )
            self._requests: dict[str, Request] = {}

    # What vLLM asks in the scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Pass on the facts of the workers, the first rank first."""
        facts = [metadata[rank] for rank in sorted(metadata)]
        self._decider.learn([each.facts for each in facts if isinstance(each, HandshakeMetadata)])

    def on_new_request(self, request: Request) -> None:
        """A request came in."""
        self._requests[request.request_id] = request
        self._decider.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be supplied, and whether asynchronously."""
        return self._decider.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has blocks for the tokens to supply."""
        self._decider.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The work that goes with a step."""
        preempted = scheduler_output.preempted_req_ids or ()
        counts = scheduler_output.num_scheduled_tokens
        return StepMetadata(self._decider.step(counts, self._requests, preempted))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' report on a step."""
        metadata = connector_output.kv_connector_worker_meta
        self._decider.report(metadata.report if isinstance(metadata, WorkerMetadata) else None)
        self._decider.loaded(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of a request that ended are still needed, and what it reused."""
        self._requests.pop(request.request_id, None)
        return self._decider.finish(request)

    def reset_cache(self) -> bool:
        """Nothing: keys depend on the weights, so stored K/V stays valid."""
        return False

    # What vLLM asks in a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Detect the layout of blocks, identify the model, and open the store."""
        try:
            names = sorted(kv_caches, key=extract_layer_index)
            self._worker = self._start.make_worker(names, self._repairs)
        except ConfigError:
            raise
        except Exception as error:  # a model or back end may raise anything
            self._refusal = _told(error)
        self._move_refusal = (
            "the model is out of reach; start vLLM with "
            "--worker-cls kvboost.connectors.vllm.worker.KVBoostWorker"
        )

    def attach_model(self, model: torch.nn.Module) -> None:
        """Certify vLLM's model for moved text, and for K/V that Transformers has stored."""
        is_everywhere = self._start.agree([self._worker is not None])[0]
        if self._worker is None or not is_everywhere:
            return
        try:
            self._start.certify(model, self._worker)
            self._move_refusal = ""
        except Exception as error:
            self._move_refusal = _told(error)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """The facts of this worker."""
        if self._worker is None:
            return HandshakeMetadata(Facts(b"", self._refusal, "", must_prefetch=False, changes=()))
        return HandshakeMetadata(self._worker.facts(self._move_refusal))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks are about to be taken from requests."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.wait_for_saves(kv_connector_metadata.work.preempted)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the work that does not need the model."""
        if self._worker is not None:
            self._worker.begin_step(self._step_work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer has written its K/V."""
        if self._worker is not None:
            self._worker.before_attention(layer_name)

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Nothing: whole requests are saved, during later steps."""

    def wait_for_save(self) -> None:
        """Start saves, whose blocks vLLM keeps until they are done, and repair moved text."""
        if self._worker is not None:
            self._worker.end_step(self._step_work())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests with saved blocks, and requests with loaded or failed ones."""
        if self._worker is None:
            return None, None
        return self._worker.take_finished(self._step_work())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute after all."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The report for the scheduler's side."""
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else WorkerMetadata(report)

    def shutdown(self) -> None:
        """Wait for pending writes, then close all tiers."""
        if self._worker is not None:
            self._worker.close()

    # What vLLM asks anywhere.

    def get_kv_connector_stats(self) -> KVBoostStats | None:
        """Counts since the last call."""
        if self._scheduler is not None:
            counts, self._scheduler.counts = self._scheduler.counts, Counter()
            return KVBoostStats.of(counts)
        if self._worker is None:
            return None
        now = Counter(self._worker.metrics.snapshot())
        new, self._counted = now - self._counted, now
        return KVBoostStats.of(new)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVBoostStats:
        """Counts that came from another process."""
        return KVBoostStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVBoostPromMetrics:
        """Counters for vLLM's Prometheus endpoint."""
        return KVBoostPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a dropped save is a later miss, not a loss."""
        return False

    @property
    def _decider(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def _blocks_of(self, request_id: str) -> Sequence[int]:
        assert self._kv_cache_manager is not None
        blocks: Sequence[int] = self._kv_cache_manager.get_block_ids(request_id)[0]
        return blocks

    def _step_work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.work
