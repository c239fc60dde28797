"""Certification: measure, when a model is loaded, whether and how its K/V can be reused.

Nothing depends on a model's name: geometry is read off a run, our sparse prefill is compared with
the model's own forward, and the rotation of every cached tensor is fitted and checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import DynamicCache

from kvboost.core import KVGeometry, PlaneGroup, Rotation, Span
from kvboost.errors import UnsupportedModel, reason_of
from kvboost.models.numerics import product_precision
from kvboost.models.packed import ForwardCache, Segment, run, run_last
from kvboost.models.pool import BlockPool
from kvboost.models.rows import Rows, private_rows
from kvboost.rope import rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_PROBE_TOKENS = 96
MORE_PROBE_TOKENS = 192  # on GPUs: FlexAttention comes in at 128 queries
NUM_COMPARED = 8  # of the last tokens, which attend to all others; logits are costly
NUM_APPENDED = (80, 20, 1)  # attention takes different paths for many, few and one
# Relative error of a row of logits. fp32 leaves room for another summation order; 16-bit dtypes
# for rounding, which a wrong mask or position exceeds many times over.
LOGITS_TOLERANCE = {"float32": 1e-4, "float64": 1e-8, "float16": 2e-2, "bfloat16": 5e-2}
ROUNDED_LIKE = {"highest": "float32", "high": "float16", "medium": "bfloat16"}  # high: TF32
MOST_TOLERANCE = 0.2  # a cap for any model's rounding; a wrong mask or position exceeds it
ROTATION_TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}
ROTATION_POSITIONS = (1, 37, 900)


@dataclass(frozen=True)
class Rotations:
    """Per plane, how it rotates with position (None: it does not); or why that is not known."""

    planes: Mapping[int, Rotation | None] = field(default_factory=dict)
    refusal: str = ""


def probe_tokens(vocabulary: int, count: int) -> torch.Tensor:
    """Token ids to measure with, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, vocabulary - 1, (count,), generator=generator)


def _probe_of(model: PreTrainedModel) -> torch.Tensor:
    count = NUM_PROBE_TOKENS if model.device.type == "cpu" else MORE_PROBE_TOKENS
    return probe_tokens(model.config.get_text_config().vocab_size, count).to(model.device)


def check_placement(model: PreTrainedModel) -> None:
    """Whether all weights are on one device, or on several GPUs.

    Raises:
        UnsupportedModel: they are not.
    """
    devices = {each.device for each in model.parameters()}
    kinds = {device.type for device in devices}
    if "meta" in kinds:
        raise UnsupportedModel(
            "some of its weights are offloaded: load it without device_map, or with "
            "max_weight_bytes"
        )
    if len(devices) > 1 and kinds != {"cuda"}:
        listed = " and ".join(sorted(map(str, devices)))
        raise UnsupportedModel(
            f"its weights are on {listed}: load it on GPUs only, or on the CPU only"
        )


def measure_geometry(model: PreTrainedModel) -> KVGeometry:
    """Run one token and read the shapes that each layer caches.

    Raises:
        UnsupportedModel: a layer keeps something other than K and V.
    """
    cached = list(cached_tensors(model, _probe_of(model)[:1, None], [0]))
    is_split = len({tensor.device for _, tensor in cached}) > 1
    kinds: dict[tuple[int, int, int | None], list[int]] = {}
    for plane, tensor in cached:
        device = tensor.device.index if is_split else None
        kinds.setdefault((tensor.shape[1], tensor.shape[3], device), []).append(plane)
    groups = [PlaneGroup(tuple(planes), *kind) for kind, planes in kinds.items()]
    dtypes = {tensor.dtype for _, tensor in cached}
    if len(dtypes) != 1:
        raise UnsupportedModel(f"its layers cache in different dtypes: {dtypes}")
    dtype = dtypes.pop()
    num_layers = 1 + max(plane for plane, _ in cached) // 2
    return KVGeometry(num_layers, tuple(groups), str(dtype).removeprefix("torch."), dtype.itemsize)


@dataclass(frozen=True)
class Native:
    """Logits of the probe tokens by the model's own prefill, and the tolerance for others."""

    logits: torch.Tensor  # [tokens, vocabulary]
    tolerance: float
    is_exact: bool  # in 32 bits or more: rounding explains no error


def run_native(model: PreTrainedModel, geometry: KVGeometry) -> Native:
    """Full prefill by the model itself; rounded to 16 bits also in two parts.

    Where the model differs from itself, we may differ from it twice as much.
    """
    tokens = _probe_of(model)[None]
    logits = model(input_ids=tokens, past_key_values=DynamicCache(), use_cache=True).logits[0]
    dtype = geometry.dtype
    if dtype == "float32":  # torch may be told to round the factors of products
        dtype = ROUNDED_LIKE[product_precision()]
    tolerance, is_exact = LOGITS_TOLERANCE[dtype], dtype in ("float32", "float64")
    if not is_exact:
        cache, half = DynamicCache(), tokens.shape[1] // 2
        model(input_ids=tokens[:, :half], past_key_values=cache, use_cache=True)
        again = model(input_ids=tokens[:, half:], past_key_values=cache, use_cache=True).logits[0]
        own = row_error(again, logits[half:], exact=False)
        tolerance = min(max(tolerance, 2 * own), MOST_TOLERANCE)
    return Native(logits, tolerance, is_exact)


def check_sparse_prefill(model: PreTrainedModel, geometry: KVGeometry, native: Native) -> None:
    """Compute all rows, some rows over again out of order, then tails of several lengths.

    Raises:
        UnsupportedModel: one of them differs from `native` by more than rounding.
    """
    tokens = _probe_of(model)
    rows = private_rows(geometry, len(tokens), tokens.device)
    everything = list(range(len(tokens)))
    again = everything[2::5] + everything[:1] + everything[-3:-1]
    for positions in (everything, again, *(everything[-count:] for count in NUM_APPENDED)):
        computed: Sequence[int] = positions
        if positions is not everything and positions is not again:
            rows.crop(positions[0])
            computed = range(positions[0], len(tokens))
        for plane in rows.read(Span(0, len(tokens))) if positions is again else ():
            plane[:, :, positions] = 9.0
        index = torch.tensor(positions, device=tokens.device)
        segment = Segment(rows, tokens[index].tolist(), computed)
        cache = ForwardCache(geometry, [segment], packs=False)
        logits = run(model, cache, NUM_COMPARED)[-NUM_COMPARED:]
        wanted = native.logits[index[-NUM_COMPARED:]]
        error = row_error(logits, wanted, exact=native.is_exact)
        if not error <= native.tolerance:
            raise UnsupportedModel(
                f"sparse prefill of {len(positions)} of {len(tokens)} tokens differs from the "
                f"model's own prefill by {error:.2g} of the logits' size in {geometry.dtype}"
            )


def check_packed(
    model: PreTrainedModel, geometry: KVGeometry, native: Native, *, may_join: bool = True
) -> tuple[str, bool]:
    """Why packing sequences into one forward changes their logits; empty if it does not.

    It does for models that change K/V between cache and attention. Also returns whether attention
    can be computed in parts, one for each run of rows.
    """
    tokens = _probe_of(model).tolist()
    pool = BlockPool(geometry, len(tokens), 3, model.device)
    first, second = (Rows(pool, len(tokens)) for _ in range(2))
    joins = True
    for step in range(3):
        if step == 2:
            second = Rows(pool, len(tokens), first.runs(Span(0, 32)))
        starts = ((0, 0), (40, 40), (64, 32))[step]
        stops = ((40, 40), (64, 63), (65, 96))[step]
        segments = [
            Segment(rows, tokens[start:stop], range(start, stop))
            for rows, start, stop in zip((first, second), starts, stops, strict=True)
        ]
        cache = ForwardCache(geometry, segments, packs=True, may_join=may_join, least_shared=32)
        try:
            logits = run_last(model, cache)
        except Exception as error:  # a foreign model may raise anything on unexpected K/V
            return reason_of(error), False
        joins &= cache.joins
        off = max(
            row_error(logits[each][None], native.logits[[stop - 1]], exact=native.is_exact)
            for each, stop in zip(segments, stops, strict=True)
        )
        if not off <= native.tolerance:
            return f"logits of packed sequences are off by {off:.2g} of their size", False
    return "", joins


def measure_rotations(model: PreTrainedModel, geometry: KVGeometry) -> Rotations:
    """Fit, for each plane, the rotation that carries K from position 0 to other positions.

    A sequence of one token attends to itself alone, so in every layer its K and V depend on its
    position through the rotary embedding and nothing else.
    """
    tokens = _probe_of(model)[:8, None]
    home = dict(cached_tensors(model, tokens, [0]))
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1024
    positions = [p for p in ROTATION_POSITIONS if p < longest]
    away = {p: dict(cached_tensors(model, tokens, [p])) for p in positions}
    return fit_rotations(home, away, rotary_frequencies(model), geometry.dtype)


def rotary_frequencies(model: torch.nn.Module) -> set[tuple[float, ...]]:
    """How fast the pairs of dims may turn, by any of a model's rotary embeddings."""
    return {
        tuple(buffer.cpu().double().tolist())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and not buffer.is_meta
    }


def fit_rotations(
    home: Mapping[int, torch.Tensor],
    away: Mapping[int, Mapping[int, torch.Tensor]],
    frequencies: Collection[tuple[float, ...]],
    dtype: str,
) -> Rotations:
    """Fit the rotation that turns the planes at `home` (position 0) into those `away`.

    Planes are [..., head_dim], `away` by position, of the same one-token sequences.
    """
    tolerance = ROTATION_TOLERANCE[dtype]
    found: dict[int, Rotation | None] = {}
    for plane, at_home in sorted(home.items()):
        moved = {position: tensors[plane] for position, tensors in away.items()}
        candidates = [None, *_candidates(frequencies, at_home.shape[-1])]
        best = min(candidates, key=lambda rotation: _misfit(at_home, moved, rotation))
        misfit = _misfit(at_home, moved, best)
        if not misfit <= tolerance:
            what = f"{'KV'[plane % 2]} of layer {plane // 2}"
            return Rotations(refusal=f"no rotation explains how {what} moves (misfit {misfit:.2g})")
        found[plane] = best
    return Rotations(planes=found)


def position_limit(model: PreTrainedModel) -> int | None:
    """Positions from which the rotary embedding of all tokens changes with the prompt's length."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    layered = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in layered or [parameters]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(limit or config.max_position_embeddings)
    return None


def cached_tensors(
    model: PreTrainedModel, tokens: torch.Tensor, positions: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(plane, tensor) for everything the model caches of sequences [batch, len(positions)]."""
    cache = DynamicCache(config=model.config)
    position_ids = torch.tensor(positions, device=tokens.device).expand_as(tokens)
    model(input_ids=tokens, position_ids=position_ids, past_key_values=cache, use_cache=True)
    for layer, content in enumerate(cache.layers):
        if not hasattr(content, "keys"):
            raise UnsupportedModel(f"layer {layer} keeps a recurrent state, not K/V")
        if content.keys is not None:  # None: the layer shares another layer's K/V
            yield 2 * layer, content.keys
            yield 2 * layer + 1, content.values


def row_error(ours: torch.Tensor, native: torch.Tensor, *, exact: bool) -> float:
    """Relative error of the worst row; short of it where rounding may flip an expert."""
    errors = (ours - native).float().norm(dim=-1) / native.float().norm(dim=-1)
    return float(errors.max() if exact else errors.quantile(0.75))


def _candidates(frequencies: Collection[tuple[float, ...]], head_dim: int) -> Iterator[Rotation]:
    layouts: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
    for inv_freq in sorted(frequencies):
        width = 2 * len(inv_freq)
        for offset in sorted({0, head_dim - width}) if width <= head_dim else ():
            for layout in layouts:
                yield Rotation(inv_freq, offset, layout)


def _misfit(at_home: torch.Tensor, moved: dict[int, Any], rotation: Rotation | None) -> float:
    """Largest relative error, by head and token, of what the rotation predicts."""
    worst = 0.0
    for position, actual in moved.items():
        expected = at_home if rotation is None else rotate(at_home.float(), rotation, position)
        distance = (expected.float() - actual.float()).norm(dim=-1)
        size = actual.float().norm(dim=-1).clamp_min(1e-12)
        worst = max(worst, float((distance / size).max()))
    return worst
