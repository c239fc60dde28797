"""Models that compute other K/V have other names; those that compute the same have the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvboost.models.buffers import changed_buffers
from kvboost.models.certify import measure_geometry
from kvboost.models.fingerprint import COSMETIC, fingerprint
from kvboost.models.hf import HFModel
from kvboost.models.numerics import numerics
from tiny_models import SUPPORTED, build

GEOMETRY = HFModel(build("llama", {})).geometry
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
TIED = {"tie_word_embeddings": True}


def swap_rows(weight: torch.Tensor) -> None:
    weight[[5, 7]] = weight[[7, 5]].clone()


def flip_a_bit(weight: torch.Tensor) -> None:
    weight.view(-1).view(torch.uint8)[4001] ^= 1


def narrow_one(model: PreTrainedModel) -> None:
    norm = model.model.norm
    norm.weight.data = torch.ones_like(norm.weight, dtype=torch.bfloat16)


def turn_faster(model: PreTrainedModel) -> None:
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 7e4}


CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "two rows of the embedding": lambda model: swap_rows(model.model.embed_tokens.weight),
    "two rows of a projection": lambda model: swap_rows(model.model.layers[1].mlp.up_proj.weight),
    "two columns": lambda model: swap_rows(model.model.layers[1].mlp.down_proj.weight.T),
    "a bit": lambda model: flip_a_bit(model.model.layers[0].self_attn.k_proj.weight),
    "a bit of the output": lambda model: flip_a_bit(model.lm_head.weight),
    "a dtype": narrow_one,
    "rope_theta": turn_faster,
    "rms_norm_eps": lambda model: setattr(model.config, "rms_norm_eps", 3e-5),
    "frequencies in memory": lambda model: model.model.rotary_emb.inv_freq.mul_(1.001),
    "frequencies in 16 bits": lambda model: model.model.rotary_emb.half(),
}


def print_of(model: PreTrainedModel) -> bytes:
    return fingerprint(model, GEOMETRY)


@pytest.mark.tiny
@torch.no_grad()
def test_what_changes_the_numbers_changes_the_fingerprint() -> None:
    prints = {"nothing": print_of(build("llama", WIDE))}
    for what, change in CHANGES.items():
        model = build("llama", WIDE)
        change(model)
        prints[what] = print_of(model)
    assert len(set(prints.values())) == len(prints), prints


@torch.no_grad()
def test_what_changes_the_numbers_of_a_real_model_changes_its_fingerprint(smol: str) -> None:
    prints = {}
    for what in (None, *CHANGES):
        model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
        if what is not None:
            CHANGES[what](model)
        prints[what] = print_of(model)
    assert len(set(prints.values())) == len(prints), prints


@pytest.mark.tiny
def test_what_does_not_change_the_numbers_changes_nothing() -> None:
    known = print_of(build("llama", {}))
    model = build("llama", {})
    model.config.use_cache = False
    model.config.id2label = {0: "no", 1: "yes"}
    model.config.architectures = ["Another"]
    assert print_of(model) == known
    assert print_of(model.to(torch.bfloat16)) != known


@pytest.mark.tiny
def test_it_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = build("gemma3n_text", SUPPORTED["gemma3n-shared-kv"][1])
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    state = torch.get_rng_state()
    print_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert all(torch.equal(buffers[name], tensor) for name, tensor in model.named_buffers())


@pytest.mark.tiny
@pytest.mark.parametrize("name", SUPPORTED)
def test_buffers_that_no_checkpoint_holds_follow_from_the_config(name: str) -> None:
    assert list(changed_buffers(build(*SUPPORTED[name]))) == []


@pytest.mark.tiny
@torch.no_grad()
def test_frequencies_of_another_kind_of_cpu_are_the_same() -> None:
    """Measured: AVX2 and AVX-512 round `theta ** x` to neighbouring numbers."""
    model = build("llama", {})
    known, bits = print_of(model), numerics(model, prepacked=False)
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(torch.nextafter(frequencies, torch.ones_like(frequencies)))
    assert print_of(model) == known
    assert numerics(model, prepacked=False) != bits, "not so where bits are promised"


class Scaled(torch.nn.Linear):
    """A quantised layer of those that keep scales beside their weight, not as a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 4)
        self.weight.data.fill_(1.0)
        self.bias.data.fill_(1.0)
        self.scale = torch.tensor(scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.scale


@pytest.mark.tiny
def test_scales_that_only_a_checkpoint_shows_count() -> None:
    model = build("llama", {})
    prints = set()
    for scale in (0.5, 0.25):
        model.model.layers[0].mlp.gate_proj = Scaled(scale)
        prints.add(print_of(model))
    assert len(prints) == 2


# The rule of docs/adr/0034-fingerprint.md once more, from files alone.


def tensors_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def print_of_files(folder: Path) -> bytes:
    contents = {}
    for name, tensor in tensors_in(folder):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).partition(".")[2]
        contents[name] = [dtype, list(tensor.shape), blake3(data).hexdigest()]
    if contents.get("lm_head.weight") == contents["model.embed_tokens.weight"]:
        del contents["lm_head.weight"]
    settings = AutoConfig.from_pretrained(folder).to_dict()
    kept = {n: v for n, v in settings.items() if n not in COSMETIC and not n.startswith("_")}
    said = {"settings": kept, "geometry": repr(GEOMETRY), "tensors": contents}
    return sha256(json.dumps(said, sort_keys=True).encode()).digest()


@pytest.mark.tiny
@pytest.mark.parametrize("differences", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_files_alone_tell_the_fingerprint(
    tmp_path: Path, model_type: str, differences: dict[str, Any]
) -> None:
    model = build(model_type, differences)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert print_of_files(tmp_path) == print_of(model)
    assert print_of_files(tmp_path) == print_of(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_files_of_a_real_model_tell_its_fingerprint(smol: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(smol, dtype="auto")
    geometry = measure_geometry(model)
    assert fingerprint(model, geometry) != print_of(model)
    assert print_of_files(Path(smol)) == print_of(model)


@pytest.mark.tiny
def test_tied_weights_count_once_whether_a_file_has_them_twice_or_not(tmp_path: Path) -> None:
    model = build("llama", TIED)
    known = print_of(model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    assert print_of_files(tmp_path) == known
    assert print_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == known
    swap_rows(head)
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)  # Transformers does not tie these
    assert print_of_files(tmp_path) == print_of(loaded) != known
