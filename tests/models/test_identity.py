"""A model is named by its files as Transformers' engine names it, and nothing is loaded for it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvboost.errors import UnsupportedModel
from kvboost.models.certify import cached_tensors, measure_geometry, rotary_frequencies
from kvboost.models.fingerprint import described, fingerprint
from kvboost.models.identity import Identity, identify
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny

PROBE = [7, 300, 12, 45, 46, 500, 8]
NAMED_ALIKE = [
    "cohere", "gemma3-two-rotations", "glm-interleaved", "gpt_oss-sinks", "granite", "llama",
    "nemotron", "phi-partial", "phi3", "qwen2", "qwen3-qknorm", "smollm3-nope", "starcoder2",
]  # fmt: skip


def saved(folder: Path, name: str, seed: int = 0) -> str:
    build(*SUPPORTED[name], seed=seed).save_pretrained(folder, max_shard_size="300KB")
    return str(folder)


def found_in(folder: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Identity:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    geometry = replace(measure_geometry(model), **changes)
    return identify(folder, dtype, geometry, PROBE, Path(folder) / "kept")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMED_ALIKE)
def test_files_give_the_name_and_first_layers_give_the_planes_of_the_loaded_model(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = saved(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = found_in(folder, dtype)
    assert found.fingerprint == fingerprint(model, measure_geometry(model)) and not found.refusal
    assert found.frequencies == rotary_frequencies(model)
    with torch.no_grad():
        cached = dict(cached_tensors(model, torch.tensor([PROBE]), range(len(PROBE))))
    assert found.planes is not None
    planes = torch.cat([cached[plane] for plane in sorted(cached)])
    assert len(planes) >= len(found.planes) >= 4
    torch.testing.assert_close(found.planes, planes[: len(found.planes)])


def test_a_real_model_in_another_type_than_its_file(smol: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    geometry = measure_geometry(model)
    with TemporaryDirectory() as kept:
        found = identify(smol, torch.float32, geometry, PROBE, Path(kept))
    assert found.fingerprint == fingerprint(model, geometry) and found.planes is not None


def test_other_weights_types_and_shapes_have_other_names(tmp_path: Path) -> None:
    folder = saved(tmp_path / "one", "llama")
    other = saved(tmp_path / "two", "llama", seed=1)
    found = [
        found_in(folder),
        found_in(other),
        found_in(folder, torch.bfloat16),
        found_in(folder, dtype="half"),
    ]
    assert len({each.fingerprint for each in found}) == 4


def test_a_second_start_reads_no_tensor_and_a_changed_byte_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "llama")
    first = found_in(folder)
    num_hashed = 0

    def counted(tensor: torch.Tensor, dtype: torch.dtype) -> list[Any]:
        nonlocal num_hashed
        num_hashed += 1
        return described(tensor, dtype)

    monkeypatch.setattr("kvboost.models.checkpoint.described", counted)
    assert found_in(folder).fingerprint == first.fingerprint and num_hashed == 0
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    before = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found_in(folder).fingerprint != first.fingerprint
    with safe_open(file, "pt") as opened:
        assert num_hashed == len(opened.keys())  # of that file alone


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_checkpoint_that_transformers_converts_has_a_name_of_its_own(
    tmp_path: Path, name: str
) -> None:
    found = found_in(saved(tmp_path, name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "made from other tensors" in found.refusal and found.planes is None
    assert found.fingerprint != fingerprint(model, measure_geometry(model))
    assert found.frequencies == rotary_frequencies(model)


def test_a_quantised_checkpoint_has_a_name_of_its_own(tmp_path: Path) -> None:
    geometry = measure_geometry(build(*SUPPORTED["llama"]))
    names = set()
    for zero_point in (True, False):
        folder = tmp_path / str(zero_point)
        saved(folder, "llama")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "zero_point": zero_point}
        (folder / "config.json").write_text(json.dumps(config))
        found = identify(str(folder), torch.float32, geometry, PROBE, folder / "kept")
        assert found.refusal == "its checkpoint is quantised" and found.planes is None
        names.add(found.fingerprint)
    assert len(names) == 2


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    geometry = measure_geometry(build(*SUPPORTED["llama"]))
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UnsupportedModel, match="no safetensors files"):
        identify(folder, torch.float32, geometry, PROBE, tmp_path)


@pytest.mark.parametrize("other", ["model.safetensors", "consolidated.safetensors"])
def test_two_sets_of_files_are_refused(tmp_path: Path, other: str) -> None:
    folder = saved(tmp_path, "llama")
    geometry = measure_geometry(build(*SUPPORTED["llama"]))
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="several sets of weights"):
        identify(folder, torch.float32, geometry, PROBE, tmp_path)


def test_weights_of_8_bits_are_quantised_whatever_the_config_says(tmp_path: Path) -> None:
    model = build(*SUPPORTED["llama"])
    model.save_pretrained(tmp_path)
    geometry, names = measure_geometry(model), set()
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(each for each in tensors if "q_proj" in each)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    for scale in (1.0, 2.0):
        tensors["scale"] = torch.tensor([scale])
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        found = identify(str(tmp_path), torch.float32, geometry, PROBE, tmp_path / "kept")
        assert found.refusal == "its checkpoint is quantised" and found.planes is None
        names.add(found.fingerprint)
    assert len(names) == 2


def test_a_model_that_the_engine_changes_has_a_name_of_its_own(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    geometry = measure_geometry(build(*SUPPORTED["llama"]))
    plain, changed = (
        identify(folder, torch.float32, geometry, PROBE, tmp_path / "kept", is_changed=each)
        for each in (False, True)
    )
    assert plain.fingerprint != changed.fingerprint and changed.planes is None


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_positions_that_change_with_the_length_are_refused(tmp_path: Path, name: str) -> None:
    geometry = measure_geometry(build(*SUPPORTED[name]))
    with pytest.raises(UnsupportedModel, match="length"):
        identify(saved(tmp_path, name), torch.float32, geometry, PROBE, tmp_path)
