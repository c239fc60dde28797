"""The name of a model's K/V is the same for an engine that runs the model itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvboost.core import Span
from kvboost.errors import UnsupportedModel
from kvboost.models.hf import HFModel
from kvboost.models.identity import identify
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny

PROBE = [7, 300, 12, 45, 46, 500, 8]


def saved(folder: Path, name: str, seed: int = 0) -> str:
    build(*SUPPORTED[name], seed=seed).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-qknorm"])
def test_a_model_is_named_as_transformers_engine_names_it(tmp_path: Path, name: str) -> None:
    model = HFModel(build(*SUPPORTED[name]))
    found = identify(saved(tmp_path, name), torch.float32, model.geometry, PROBE)
    assert found.fingerprint == model.fingerprint
    turned = {rotation.inv_freq for rotation in model.rotations.values() if rotation}
    assert turned and turned <= found.frequencies


def test_its_planes_are_what_the_model_caches(tmp_path: Path) -> None:
    model = HFModel(build(*SUPPORTED["llama"]))
    found = identify(saved(tmp_path, "llama"), torch.float32, model.geometry, PROBE)
    slots = model.fresh_rows(len(PROBE))
    model.forward(slots, PROBE, range(len(PROBE)))
    (rows,) = slots.read(Span(0, len(PROBE)))
    assert model.geometry.groups[0].planes == tuple(range(len(rows)))
    torch.testing.assert_close(found.planes, rows, rtol=1e-4, atol=1e-5)


def test_other_weights_types_and_shapes_have_other_names(tmp_path: Path) -> None:
    geometry = HFModel(build(*SUPPORTED["llama"])).geometry
    folder = saved(tmp_path / "one", "llama")
    other = saved(tmp_path / "two", "llama", seed=1)
    names = {
        identify(folder, torch.float32, geometry, PROBE).fingerprint,
        identify(other, torch.float32, geometry, PROBE).fingerprint,
        identify(folder, torch.bfloat16, geometry, PROBE).fingerprint,
        identify(folder, torch.float32, replace(geometry, dtype="half"), PROBE).fingerprint,
    }
    assert len(names) == 4


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_positions_that_change_with_the_length_are_refused(tmp_path: Path, name: str) -> None:
    geometry = HFModel(build(*SUPPORTED[name])).geometry
    with pytest.raises(UnsupportedModel, match="length"):
        identify(saved(tmp_path, name), torch.float32, geometry, PROBE)
