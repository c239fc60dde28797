"""Start of a worker: identify the model, find its blocks of K/V, and certify both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
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
        """Learn how the blocks of layers are laid out, name the model, and open the store.

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
        )
        check_round_trip(cache, self._scratch_blocks)
        self._identity = self._identify(cache.geometry)
        rank, size = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size
        # A rank has some of the heads, which are no use to others; and K/V that was not compared
        # with that of Transformers must not pass for it.
        name = f"vllm, rank {rank} of {size}, {self._changes}"
        worker = WorkerSide(self._own_options(), repairs, cache, is_first=rank == 0)
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

    def _identify(self, geometry: KVGeometry) -> Identity:
        """Name the model, as a Transformers process does where its files allow it."""
        model, (group,) = self._vllm_config.model_config, geometry.groups
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
                is_changed=any(self._changes),
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
        if config.parallel_config.tensor_parallel_size > 1:
            raise UnsupportedModel("moved text is repaired on one rank only (tensor parallel)")
        if config.model_config.uses_mrope:
            raise UnsupportedModel("its positions have several dimensions")
        if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
            raise UnsupportedModel("its experts are spread over engines that go in step")
        backend = cache.layers[0].get_attn_backend()
        if getattr(backend, "forward_includes_kv_cache_update", True):
            raise UnsupportedModel(f"{backend.get_name()} writes K/V while it attends")
        sparse = SparseModel(model, cache, config)
        vocabulary = config.model_config.get_vocab_size()
        check_sparse_prefill(sparse, cache, vocabulary, self._scratch_blocks)
        if identity.planes is not None:
            check_known(sparse, cache, self._probe, identity.planes)
            worker.name_model(identity.fingerprint)
        else:
            log.info("K/V is not shared with Transformers processes: %s", identity.refusal)
        longest = config.model_config.max_model_len
        rotations = measure_rotations(sparse, cache, vocabulary, identity.frequencies, longest)
        if rotations.refusal:
            raise UnsupportedModel(rotations.refusal)
        worker.allow_moved(sparse, rotations.planes)

    @property
    def _changes(self) -> tuple[Any, ...]:
        """What makes vLLM's model another one than its files say."""
        model = self._vllm_config.model_config
        names = ("quantization", "quantization_config", "hf_overrides", "hf_config_path")
        return tuple(getattr(model, name, None) for name in names)

    @property
    def _probe(self) -> list[int]:
        vocabulary = self._vllm_config.model_config.get_vocab_size()
        return [int(token) for token in probe_tokens(vocabulary, NUM_KNOWN)]

    @property
    def _scratch_blocks(self) -> list[int]:
        """Blocks to try things with before there are requests; vLLM keeps the first one empty."""
        count = -(-NUM_PROBE_TOKENS // self._vllm_config.cache_config.block_size)
        return list(range(1, 1 + count))
