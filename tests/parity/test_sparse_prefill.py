"""The primitive on every architecture: any positions, in any order, equal the model's own."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from certified import tiny_model
from kvboost.core import Span
from kvboost.errors import UnsupportedModel
from kvboost.models import certify, install
from kvboost.models.hf import HFModel
from kvboost.models.packed import Segment
from kvboost.models.rows import Rows
from tiny_models import REFUSED, SUPPORTED, VOCABULARY, build

pytestmark = pytest.mark.tiny

NUM_TOKENS = 96  # four times the sliding windows of the tiny models
TOLERANCE = 2e-5
TOKENS = torch.randint(
    5, VOCABULARY, (NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(1)
).tolist()
PROMPT, NEXT = TOKENS[:-1], TOKENS[-1]


@cache
@torch.no_grad()
def native_logits(name: str) -> torch.Tensor:
    """By the model's own attention and cache: all of the prompt, then one decoding step."""
    model = build(*SUPPORTED[name])
    cache = DynamicCache(config=model.config)
    prompt = model(input_ids=torch.tensor([PROMPT]), past_key_values=cache).logits[0]
    step = model(input_ids=torch.tensor([[NEXT]]), past_key_values=cache).logits[0]
    return torch.cat([prompt, step])


def error(ours: torch.Tensor, native: torch.Tensor) -> float:
    return float((ours - native).abs().max())


def garble(slots: Rows, positions: list[int]) -> None:
    for plane in slots.read(Span(0, NUM_TOKENS)):
        plane[:, :, positions] = 9.0


def run(model: HFModel, slots: Rows, positions: list[int]) -> torch.Tensor:
    tokens = [TOKENS[position] for position in positions]
    return model.forward(slots, tokens, positions, num_logits=len(positions))


@pytest.mark.parametrize("name", SUPPORTED)
def test_any_positions_in_any_order_equal_the_models_own_prefill(name: str) -> None:
    native = native_logits(name)
    model, chance = tiny_model(name), random.Random(name)
    slots = model.fresh_rows(NUM_TOKENS + 1)
    assert error(run(model, slots, list(range(NUM_TOKENS))), native[:-1]) <= TOLERANCE
    for _ in range(5):
        again = chance.sample(range(NUM_TOKENS), chance.randint(1, NUM_TOKENS - 1))
        garble(slots, again)
        assert error(run(model, slots, again), native[again]) <= TOLERANCE
    step = model.forward(slots, [NEXT], range(NUM_TOKENS, NUM_TOKENS + 1))
    assert error(step, native[-1:]) <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", SUPPORTED)
def test_appended_pieces_equal_the_models_own_prefill(name: str) -> None:
    native, model = native_logits(name), tiny_model(name)
    bare = build(*SUPPORTED[name])
    slots, cache = model.fresh_rows(NUM_TOKENS), DynamicCache(config=bare.config)
    # Short and long pieces: the long one takes the two-kernel attention.
    for start, stop in ((0, 7), (7, 8), (8, 88), (88, 96)):
        piece, positions = PROMPT[start:stop], range(start, stop)
        logits = model.forward(slots, piece, positions, num_logits=stop - start)
        # Other shapes round otherwise: a piece may be as far off as the model's own piece is.
        own = bare(input_ids=torch.tensor([piece]), past_key_values=cache).logits[0]
        allowed = min(5e-5, max(TOLERANCE, 2 * error(own, native[start:stop])))
        assert error(logits, native[start:stop]) <= allowed


@pytest.mark.parametrize("name", SUPPORTED)
def test_one_wrong_position_is_seen(name: str) -> None:
    native, model = native_logits(name), tiny_model(name)
    slots = model.fresh_rows(NUM_TOKENS)
    run(model, slots, list(range(NUM_TOKENS)))
    positions = [40, 60, NUM_TOKENS - 1]
    tokens = [TOKENS[position] for position in positions]
    logits = model.forward(slots, tokens, [40, 59, NUM_TOKENS - 1], num_logits=3)
    assert error(logits[1:], native[[60, NUM_TOKENS - 1]]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", SUPPORTED)
def test_how_keys_turn_with_position_is_found(name: str) -> None:
    model = tiny_model(name)
    turning = [rotation for rotation in model.rotations.values() if rotation is not None]
    num_planes = sum(len(group.planes) for group in model.geometry.groups)
    assert len(model.rotations) == num_planes
    assert 0 < len(turning) <= num_planes / 2


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_right_are_refused_with_the_reason(name: str) -> None:
    model_type, differences, reason = REFUSED[name]
    model = build(model_type, differences)
    native = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=rf"\({model_type}\).*{reason}"):
        HFModel(model)
    assert model.config._attn_implementation == native


def test_a_model_whose_sparse_prefill_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "offset", property(lambda self: self.rows.length))
    with pytest.raises(UnsupportedModel, match="differs from the model's own prefill"):
        HFModel(build(*SUPPORTED["llama"]))


def test_the_length_from_which_rope_changes_is_known() -> None:
    limits = {
        name: HFModel(build(*SUPPORTED[name])).position_limit
        for name in ("llama", "llama-dynamic", "phi3-longrope")
    }
    assert limits == {"llama": None, "llama-dynamic": 4096, "phi3-longrope": 1024}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2-softcap", "mistral-sliding"])
def test_rounding_is_no_excuse_for_a_mask_that_is_off_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much a model differs from itself, what it may differ from us stays below that."""
    model = build(*SUPPORTED[name]).bfloat16()
    with torch.no_grad():
        geometry = certify.measure_geometry(model)
        native = certify.run_native(model, geometry)
        assert native.tolerance < certify.MOST_TOLERANCE
        install.switch(model, install.implementations(model)[0])
        lenient = replace(native, tolerance=certify.MOST_TOLERANCE)
        certify.check_sparse_prefill(model, geometry, lenient)
        right = Segment.offset.fget
        for wrong in (1, -1):
            off_by_one = property(lambda self, by=wrong: right(self) + by)
            monkeypatch.setattr(Segment, "offset", off_by_one)
            with pytest.raises(UnsupportedModel, match="differs from the model's own prefill"):
                certify.check_sparse_prefill(model, geometry, lenient)
