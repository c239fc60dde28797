"""Moving on every architecture: turned keys are the model's own, full repair is full prefill."""

from __future__ import annotations

import pytest
import torch

from kvboost.core import Rotation, Span
from kvboost.models import certify
from kvboost.models.hf import HFModel
from kvboost.rope import move
from tiny_models import SUPPORTED, VOCABULARY, build

pytestmark = pytest.mark.tiny

NUM_TOKENS, BEFORE, NEW_BEFORE = 48, 5, 21
TOKENS = torch.randint(
    5, VOCABULARY, (NUM_TOKENS + BEFORE,), generator=torch.Generator().manual_seed(2)
).tolist()
OTHER = torch.randint(
    5, VOCABULARY, (NEW_BEFORE,), generator=torch.Generator().manual_seed(3)
).tolist()
DOCUMENT = TOKENS[BEFORE:]
PROMPT = OTHER + DOCUMENT


def encode(model: HFModel, tokens: list[int]) -> tuple[object, torch.Tensor]:
    slots = model.fresh_rows(len(tokens))
    logits = model.forward(slots, tokens, range(len(tokens)), num_logits=len(tokens))
    return slots, logits


def moved_rows(model: HFModel) -> list[torch.Tensor]:
    """The document's K/V, computed behind five tokens, turned to where the prompt has it."""
    home, _ = encode(model, TOKENS)
    rows = [part.clone() for part in home.read(Span(BEFORE, len(TOKENS)))]
    move(rows, model.geometry, model.rotations, NEW_BEFORE - BEFORE)
    return rows


@pytest.mark.parametrize("name", SUPPORTED)
def test_moved_keys_of_layer_0_are_those_of_the_new_place(name: str) -> None:
    model = HFModel(build(*SUPPORTED[name]))
    assert model.rotations, model.rotation_refusal
    rows = moved_rows(model)
    away, _ = encode(model, PROMPT)
    for group, ours, theirs in zip(
        model.geometry.groups, rows, away.read(Span(NEW_BEFORE, len(PROMPT))), strict=True
    ):
        for place, plane in enumerate(group.planes):
            if plane // 2 == 0:
                assert float((ours[place] - theirs[place]).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", SUPPORTED)
def test_repair_of_everything_is_a_full_prefill(name: str) -> None:
    model = HFModel(build(*SUPPORTED[name]))
    rows = moved_rows(model)
    _, expected = encode(model, PROMPT)
    slots = model.fresh_rows(len(PROMPT))
    span = Span(NEW_BEFORE, len(PROMPT))
    slots.write(span, rows)
    positions = list(range(len(PROMPT)))
    logits = model.forward(slots, PROMPT, positions, num_logits=len(PROMPT), corrected=[span])
    assert float((logits - expected).abs().max()) <= 1e-5


def test_at_least_35_architectures_are_moved_above() -> None:
    assert len({model_type for model_type, _ in SUPPORTED.values()}) >= 35


def test_a_rotation_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = certify._candidates

    def wrong(frequencies: set[tuple[float, ...]], head_dim: int) -> list[Rotation]:
        made = right(frequencies, head_dim)
        return [Rotation(tuple(1.1 * f for f in r.inv_freq), r.offset, r.layout) for r in made]

    monkeypatch.setattr(certify, "_candidates", wrong)
    model = HFModel(build(*SUPPORTED["llama"]))
    assert not model.rotations
    assert "no rotation explains how K of layer 0 moves" in model.rotation_refusal
    assert model.refusal == ""  # exact reuse is not affected


def test_turning_the_wrong_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = certify.rotate
    monkeypatch.setattr(certify, "rotate", lambda k, r, delta: right(k, r, -delta))
    assert not HFModel(build(*SUPPORTED["llama"])).rotations
