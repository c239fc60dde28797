"""Start of a worker: identify the model, find its blocks of K/V, and certify both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvboost.config import Options, certified_folder
from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.connectors.vllm.certify import (
    NUM_KNOWN,
    check_known,
    check_round_trip,
    check_sparse_prefill,
    measure_rotations,
)
from kvboost.connectors.vllm.sparse import SparseModel
from kvboost.connectors.vllm.worker_side import WorkerSide
from kvboost.core import KVGeometry, PlaneGroup
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models.certify import NUM_PROBE_TOKENS, probe_tokens
from kvboost.models.identity import Identity, identify
from kvboost.reuse.repair import Repair

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

PLAIN_FORMATS = ("auto", "hf", "safetensors")  # weights are those of the safetensors files


class Start:
    """Builds the worker side of the connector and certifies the model."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
    ) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._options = options
        self._identity: Identity | None = None

    def make_worker(self, names: Sequence[str], repairs: Mapping[float, Repair]) -> WorkerSide:
        """Detect the layout of blocks, identify the model, and open the store.

        Raises:
            UnsupportedModel: its K/V cannot be reused.
            ConfigError: an option is wrong.
        """
        config = self._vllm_config
        model, parallel = config.model_config, config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedModel("its layers are spread over workers (pipeline parallel)")
        if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
            raise UnsupportedModel("its tokens are spread over workers (context parallel)")
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise UnsupportedModel("not all of its layers keep the K/V of all tokens")
        found = config.compilation_config.static_forward_context
        cache = PagedCache(
            {name: found[name] for name in names},
            model.get_total_num_hidden_layers(),
            self._kv_cache_config.num_blocks,
            config.cache_config.block_size,
            model.dtype,
        )
        check_round_trip(cache, self._scratch_blocks)
        self._identity = self._identify(cache)
        rank, size = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size
        # A rank has some of the heads, which are no use to others; and K/V that was not compared
        # with that of Transformers must not pass for it.
        name = f"vllm, rank {rank} of {size}, {self._changes}"
        worker = WorkerSide(
            self._own_options(), repairs, cache, is_first=rank == 0, agree=self.agree
        )
        worker.name_model(sha256(self._identity.fingerprint + name.encode()).digest())
        return worker

    def _own_options(self) -> Options:
        """Options of this worker: a folder has one writer."""
        parallel, folder = self._vllm_config.parallel_config, self._options.disk_cache_dir
        size = parallel.tensor_parallel_size * parallel.data_parallel_size
        if size == 1:
            return self._options
        if "file:" in (self._options.cache_url or ""):
            raise ConfigError("cache_url: several workers cannot write one folder")
        if folder is None:
            return self._options
        own = f"rank-{parallel.data_parallel_rank}-{get_tensor_model_parallel_rank()}"
        return replace(self._options, disk_cache_dir=str(Path(folder) / own))

    def _identify(self, cache: PagedCache) -> Identity:
        """The model's fingerprint, the same as in a Transformers process if its files allow it."""
        model, geometry = self._vllm_config.model_config, cache.geometry
        (group,) = geometry.groups
        if (how := self._vllm_config.load_config.load_format) not in PLAIN_FORMATS:
            raise UnsupportedModel(f"its weights do not come from safetensors files ({how})")
        is_alone = self._vllm_config.parallel_config.tensor_parallel_size == 1
        whole = PlaneGroup(group.planes, model.get_total_num_kv_heads(), group.head_dim)
        try:
            return identify(
                model.model,
                model.dtype,
                KVGeometry(geometry.num_layers, (whole,), geometry.dtype, geometry.itemsize),
                self._probe if is_alone else [],
                certified_folder(),
                is_changed=cache.is_quantised or any(self._changes),
                code_revision=model.code_revision,
                revision=model.revision,
                trust_remote_code=model.trust_remote_code,
                cache_dir=self._vllm_config.load_config.download_dir,
            )
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"{model.model} cannot be named: {error}") from error

    def certify(self, model: Any, worker: WorkerSide) -> None:
        """Let a worker use K/V that Transformers has stored, and moved text.

        Raises:
            UnsupportedModel: with the reason why not.
        """
        identity, config, cache = self._identity, self._vllm_config, worker.cache
        assert identity is not None
        if cache.is_quantised:
            raise UnsupportedModel(f"its K/V is {cache.geometry.dtype}, which is not moved")
        if config.model_config.uses_mrope:
            raise UnsupportedModel("its positions have several dimensions")
        if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
            raise UnsupportedModel("its experts are spread over engines that go in step")
        backend = cache.layers[0].get_attn_backend()
        if getattr(backend, "forward_includes_kv_cache_update", True):
            raise UnsupportedModel(f"{backend.get_name()} writes K/V while it attends")
        sparse = SparseModel(model, cache, config)
        vocabulary = config.model_config.get_vocab_size()
        blocks = self._scratch_blocks
        self._together(lambda: check_sparse_prefill(sparse, cache, vocabulary, blocks))
        if identity.planes is not None:
            check_known(sparse, cache, self._probe, identity.planes)
            worker.name_model(identity.fingerprint)
        else:
            reason = identity.refusal or "each rank has heads of its own"
            log.info("K/V is not shared with Transformers processes: %s", reason)
        longest, frequencies = config.model_config.max_model_len, identity.frequencies

        def measure() -> None:
            rotations = measure_rotations(sparse, cache, vocabulary, frequencies, longest)
            if rotations.refusal:
                raise UnsupportedModel(rotations.refusal)
            worker.allow_moved(sparse, rotations.planes)

        self._together(measure)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """What is true on all ranks, which ask at the same time."""
        group = get_tp_group()
        all_flags = torch.tensor(flags, dtype=torch.uint8)
        if group.world_size > 1:
            dist.all_reduce(all_flags, dist.ReduceOp.MIN, group.cpu_group)
        return [bool(flag) for flag in all_flags]

    def _together(self, check: Callable[[], None]) -> None:
        """Run a check on all ranks. Where one fails all do: a forward waits for every rank."""
        error: Exception | None = None
        try:
            check()
        except Exception as each:  # raised below, once the others know
            error = each
        if not self.agree([error is None])[0]:
            raise error or UnsupportedModel("another rank refuses")

    @property
    def _changes(self) -> tuple[Any, ...]:
        """Settings that make vLLM's model differ from its files."""
        model = self._vllm_config.model_config
        names = ("quantization", "quantization_config", "hf_overrides", "hf_config_path")
        return tuple(getattr(model, name, None) for name in names)

    @property
    def _probe(self) -> list[int]:
        vocabulary = self._vllm_config.model_config.get_vocab_size()
        return [int(token) for token in probe_tokens(vocabulary, NUM_KNOWN)]

    @property
    def _scratch_blocks(self) -> list[int]:
        """Blocks for measurements before the first request; vLLM keeps the first one empty."""
        count = -(-NUM_PROBE_TOKENS // self._vllm_config.cache_config.block_size)
        return list(range(1, 1 + count))
