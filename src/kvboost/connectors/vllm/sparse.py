"""Sparse prefill with vLLM's own model and attention.

vLLM computes a batch of sequences, each the newest tokens of a request on top of its blocks. Give
it one request as many: every run of positions that follow each other is a sequence that ends where
the run ends, over the same blocks. K/V of all of them is written before any attends, so each token
sees the rows at or before its own position, with any back end and any model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.core import Span
from kvboost.models import spread
from kvboost.models.rows import Rows


class SparseModel:
    """vLLM's model, run over any positions of one request."""

    def __init__(self, model: Any, cache: PagedCache, vllm_config: Any) -> None:
        self._model, self._cache, self._config = model, cache, vllm_config
        limits = vllm_config.scheduler_config
        self._limits: tuple[int, int] = (limits.max_num_seqs, limits.max_num_batched_tokens)
        layer = cache.layers[0]
        builder = layer.get_attn_backend().get_builder_cls()
        spec = layer.get_kv_cache_spec(vllm_config)
        self._builder = builder(spec, cache.names, vllm_config, cache.device)
        self._correction: _Correction | None = None

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        block_ids: Sequence[int],
        correction: tuple[Rows, Sequence[Span]] | None = None,
        num_logits: int = 0,
    ) -> torch.Tensor:
        """Compute `tokens` at sorted `positions`; all rows before them are filled or among them.

        With rows of moved text and spans of it, their other rows are corrected by how the computed
        ones have changed. Returns the logits of the last `num_logits` tokens.
        """
        last = torch.empty(0, device=self._cache.device)  # hidden states, to make logits of
        start = 0
        for runs in _parts(positions, *self._limits):
            count = sum(map(len, runs))
            if correction is not None:
                rows, spans = correction
                limits = Span(runs[0].start, runs[-1].stop)
                spans = [part for span in spans if len(part := span.within(limits)) > 1]
                moved = [p for run in runs for p in range(run.start, run.stop)]
                self._correction = _Correction(self._cache, rows, spans, moved, block_ids)
            try:
                hidden = self._run(tokens[start : start + count], runs, block_ids)
            finally:
                self._correction = None
            start += count
            if len(positions) - start < num_logits:
                last = torch.cat([last, hidden]) if len(last) else hidden
        if not num_logits:
            return last
        logits: torch.Tensor = self._model.compute_logits(last[-num_logits:])
        return logits

    @torch.inference_mode()
    def alone(self, token: int, position: int, block_id: int) -> torch.Tensor:
        """K/V [planes, heads, 1, head_dim] of a token at a position, with nothing before it."""
        at = torch.tensor([position], device=self._cache.device)
        self._run([token], [Span(0, 1)], [block_id], turned_to=at)
        slot = torch.tensor([block_id * self._cache.block_size], device=self._cache.device)
        layers = range(self._cache.geometry.num_layers)
        return torch.cat([self._cache.pick(layer, slot) for layer in layers])

    def before_attention(self, layer_name: str) -> None:
        """Called in each layer after its K/V was written and before attention reads it."""
        if self._correction is not None:
            self._correction.apply(self._cache.names.index(layer_name))

    def _run(
        self,
        tokens: Sequence[int],
        runs: Sequence[Span],
        block_ids: Sequence[int],
        turned_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute runs of rows; their keys are turned to other positions where these are given."""
        device = self._cache.device
        positions = torch.cat([torch.arange(run.start, run.stop) for run in runs]).to(device)
        slots = self._cache.slots(block_ids, positions)
        metadata = self._builder.build(0, _as_sequences(runs, block_ids, slots, positions))
        names = self._cache.names
        with set_forward_context(
            dict.fromkeys(names, metadata),
            self._config,
            num_tokens=len(tokens),
            slot_mapping=dict.fromkeys(names, slots),
        ):
            hidden: torch.Tensor = self._model(
                input_ids=torch.tensor(tokens, device=device),
                positions=positions if turned_to is None else turned_to,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden


class _Correction:
    """Carries the change of computed rows to their neighbours in moved text, layer by layer."""

    def __init__(
        self,
        cache: PagedCache,
        rows: Rows,
        spans: Sequence[Span],
        computed: Sequence[int],
        block_ids: Sequence[int],
    ) -> None:
        self._cache, self._rows = cache, rows
        self._patches = spread.patches(spans, computed, rows.pool.dtype, rows.device)
        self._computed = torch.tensor(computed, device=rows.device)
        self._computed_slots = cache.slots(block_ids, self._computed)
        ranges = [torch.arange(patch.start, patch.stop) for patch in self._patches]
        self._corrected = torch.cat([torch.empty(0, dtype=torch.int64), *ranges]).to(rows.device)
        self._corrected_slots = cache.slots(block_ids, self._corrected)

    def apply(self, layer: int) -> None:
        """Correct the rows of a layer; its computed ones are in their blocks already."""
        if not self._patches:
            return
        stored = torch.stack(self._rows.whole(layer, 0, self._rows.length))[:, 0]
        fresh = self._cache.pick(layer, self._computed_slots)
        for patch in self._patches:
            spread.apply(patch, stored[:, :, patch.start : patch.stop], fresh)
        stored.index_copy_(2, self._computed, fresh)
        rows = stored.index_select(2, self._corrected).transpose(1, 2)
        self._cache.put(layer, rows, self._corrected_slots)


def _parts(positions: Sequence[int], most_runs: int, most_tokens: int) -> Iterator[list[Span]]:
    """Sorted positions as runs, in batches within the limits that vLLM was set up for."""
    cuts = [at for at, (one, two) in enumerate(pairwise(positions), 1) if two != one + 1]
    borders = [0, *cuts, len(positions)]
    batch: list[Span] = []
    room = most_tokens
    for start, stop in pairwise(borders):
        for first in range(start, stop, most_tokens):
            last = min(first + most_tokens, stop)
            if batch and (last - first > room or len(batch) == most_runs):
                yield batch
                batch, room = [], most_tokens
            batch.append(Span(positions[first], positions[last - 1] + 1))
            room -= last - first
    if batch:
        yield batch


def _as_sequences(
    runs: Sequence[Span], block_ids: Sequence[int], slots: torch.Tensor, positions: torch.Tensor
) -> CommonAttentionMetadata:
    """The batch in which each run is a sequence of its own over the same blocks."""
    device = slots.device
    starts = torch.tensor([0, *(len(run) for run in runs)], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([run.stop for run in runs], dtype=torch.int32)
    table = torch.tensor(block_ids, dtype=torch.int32, device=device)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(runs),
        num_actual_tokens=len(positions),
        max_query_len=max(map(len, runs)),
        max_seq_len=runs[-1].stop,
        block_table_tensor=table.repeat(len(runs), 1),
        slot_mapping=slots,
        causal=True,
        positions=positions,
        is_prefilling=torch.ones(len(runs), dtype=torch.bool),
    )
