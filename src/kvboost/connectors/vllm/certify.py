"""Certification inside vLLM: whether K/V can be written into its blocks, and moved there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.connectors.vllm.rows import BlockRows
from kvboost.connectors.vllm.sparse import SparseModel
from kvboost.core import Span
from kvboost.errors import UnsupportedModel
from kvboost.models.certify import (
    LOGITS_TOLERANCE,
    NUM_COMPARED,
    NUM_PROBE_TOKENS,
    ROTATION_POSITIONS,
    Rotations,
    fit_rotations,
    probe_tokens,
    row_error,
)

NUM_ROTATED = 4  # tokens with rotated keys
NUM_KNOWN = 16  # tokens, for the comparison with Transformers' K/V
# Relative error of a row (the median of a plane) in the first layers, between two engines that
# round in their own ways. Other heads, dims or rotations are off by about 1.
KNOWN_TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}


def check_round_trip(cache: PagedCache, block_ids: Sequence[int]) -> None:
    """Write numbers into blocks of every layer and read them back.

    Raises:
        UnsupportedModel: they came back otherwise.
    """
    (group,) = cache.geometry.groups
    shape = (len(group.planes), group.heads, NUM_PROBE_TOKENS, group.head_dim)
    generator = torch.Generator().manual_seed(0)
    written = torch.randn(shape, generator=generator).to(cache.dtype)
    rows, span = BlockRows(cache, block_ids), Span(0, NUM_PROBE_TOKENS)
    rows.write(span, [written])
    if not torch.equal(rows.read(span)[0].float(), written.float()):
        raise UnsupportedModel("K/V that is written into vLLM's blocks is read back otherwise")


def check_sparse_prefill(
    sparse: SparseModel, cache: PagedCache, vocabulary: int, block_ids: Sequence[int]
) -> None:
    """Compute all rows at once, then spoil some and compute these again.

    Raises:
        UnsupportedModel: what comes out differs by more than rounding.
    """
    tokens = probe_tokens(vocabulary, NUM_PROBE_TOKENS).tolist()
    whole = range(NUM_PROBE_TOKENS)
    wanted = sparse.forward(tokens, whole, block_ids, num_logits=NUM_PROBE_TOKENS).float()
    again = sorted({*whole[2::5], *whole[20:33], *whole[-3:]})
    rows = BlockRows(cache, block_ids)
    for position in again:
        span = Span(position, position + 1)
        rows.write(span, [torch.full_like(part, 9.0) for part in rows.read(span)])
    some = [tokens[position] for position in again]
    ours = sparse.forward(some, again, block_ids, num_logits=NUM_COMPARED).float()
    error = row_error(ours, wanted[again[-NUM_COMPARED:]], exact=True)
    if not error <= LOGITS_TOLERANCE[cache.geometry.dtype]:
        raise UnsupportedModel(
            f"sparse prefill of {len(again)} of {len(tokens)} tokens differs from vLLM's own by "
            f"{error:.2g} of the logits' size in {cache.geometry.dtype}"
        )


def measure_rotations(
    sparse: SparseModel,
    cache: PagedCache,
    vocabulary: int,
    frequencies: Collection[tuple[float, ...]],
    longest: int,
) -> Rotations:
    """How the keys in vLLM's blocks turn with position."""
    tokens = probe_tokens(vocabulary, NUM_ROTATED).tolist()
    positions = [position for position in ROTATION_POSITIONS if position < longest]
    planes = {
        position: torch.cat([sparse.alone(token, position, 1) for token in tokens], dim=2)
        for position in (0, *positions)
    }
    away = {position: dict(enumerate(planes[position])) for position in positions}
    return fit_rotations(dict(enumerate(planes[0])), away, frequencies, cache.geometry.dtype)


def check_known(
    sparse: SparseModel, cache: PagedCache, tokens: Sequence[int], planes: torch.Tensor
) -> None:
    """Compare the K/V of vLLM's first layers with that of Transformers.

    Raises:
        UnsupportedModel: it is something else, so that neither can use what the other has stored.
    """
    sparse.forward(tokens, range(len(tokens)), [1])
    (ours,) = BlockRows(cache, [1]).read(Span(0, len(tokens)))
    wanted = planes.float()
    distances = (ours[: len(wanted)].float() - wanted).norm(dim=-1)
    rows = distances / wanted.norm(dim=-1).clamp_min(1e-12)
    errors = rows.flatten(1).median(dim=1).values
    plane, limit = int(errors.argmax()), KNOWN_TOLERANCE[cache.geometry.dtype]
    if not errors[plane] <= limit:
        raise UnsupportedModel(
            f"vLLM's {'KV'[plane % 2]} of layer {plane // 2} is not that of Transformers: they "
            f"differ by {float(errors[plane]):.2g} of its size, rounding does by less than "
            f"{limit:.2g}"
        )
