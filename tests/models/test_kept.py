"""A certification is kept for the same model in the same software, and for nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvboost.errors import UnsupportedModel
from kvboost.models.hf import HFModel
from tiny_models import build

pytestmark = pytest.mark.tiny


@pytest.fixture
def num_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a model ran; certification is a dozen forwards, the geometry alone is one."""
    count, forward = [0], LlamaForCausalLM.forward

    @wraps(forward)
    def counted(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        return forward(*arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    return count


class Starts:
    """Starts models with one folder, and tells which ones were certified anew."""

    def __init__(self, folder: Path, num_forwards: list[int]) -> None:
        self.folder, self._num_forwards = folder, num_forwards

    def measures(self, model: PreTrainedModel | None = None) -> bool:
        self._num_forwards[0] = 0
        hosted = HFModel(model or build("llama", {}), kept_in=self.folder)
        hosted.release()
        return self._num_forwards[0] > 1

    @property
    def file(self) -> Path:
        (path,) = self.folder.iterdir()
        return path


@pytest.fixture
def starts(tmp_path: Path, num_forwards: list[int]) -> Starts:
    made = Starts(tmp_path / "certified", num_forwards)
    assert made.measures()
    return made


def test_the_second_start_finds_what_the_first_has_measured(tmp_path: Path) -> None:
    first = HFModel(build("llama", {}), kept_in=tmp_path)
    second = HFModel(build("llama", {}), kept_in=tmp_path)
    assert second.rotations == first.rotations and second.rotations
    assert (second.packs, second.joins) == (first.packs, first.joins)
    assert second.geometry == first.geometry
    assert second.fingerprint == first.fingerprint
    slots = [each.fresh_rows(8) for each in (first, second)]
    tokens = list(range(5, 13))
    logits = [
        each.forward(rows, tokens, range(8))
        for each, rows in zip((first, second), slots, strict=True)
    ]
    assert torch.equal(*logits)
    assert second.model.config._attn_implementation == first.model.config._attn_implementation


def test_a_second_start_runs_one_token(starts: Starts) -> None:
    assert not starts.measures()
    assert starts.folder.stat().st_mode & 0o777 == 0o700


def other_weights() -> PreTrainedModel:
    model = build("llama", {})
    model.lm_head.weight.data[3, 3] += 1
    return model


def hooked() -> PreTrainedModel:
    model = build("llama", {})
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    return model


def patched() -> PreTrainedModel:
    model = build("llama", {})
    norm = model.model.norm
    norm.forward = type(norm).forward.__get__(norm)
    return model


def of_another_class() -> PreTrainedModel:
    class Mine(LlamaForCausalLM):  # code of its own, as with trust_remote_code
        pass

    model = build("llama", {})
    model.__class__ = Mine
    return model


def eager() -> PreTrainedModel:
    model = build("llama", {})
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        other_weights,
        lambda: build("llama", {"rms_norm_eps": 1e-3}),
        lambda: build("llama", {}).to(torch.bfloat16),
        hooked,
        patched,
        of_another_class,
        eager,
    ],
    ids=["weights", "settings", "dtype", "hook", "forward", "class", "attention"],
)
def test_another_model_is_measured(starts: Starts, make: Callable[[], PreTrainedModel]) -> None:
    assert starts.measures(make())


@pytest.mark.parametrize("name", ["__version__", "torch.__version__", "transformers.__version__"])
def test_another_version_is_measured(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(f"kvboost.models.numerics.{name}", "0.0")
    assert starts.measures()


def test_another_number_of_threads_is_measured(starts: Starts) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert starts.measures()
    finally:
        torch.set_num_threads(before)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def rename(path: Path) -> None:
    """The certification of another model under this one's name."""
    other = path.parent.parent / "other"
    HFModel(build("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
            kept_in=other).release()  # fmt: skip
    (wrong,) = other.iterdir()
    wrong.replace(path)


def link(path: Path) -> None:
    path.replace(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        rename,
        link,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"half", b"full")),
        lambda path: path.chmod(0o666),
        lambda path: path.parent.chmod(0o777),
    ],
    ids=["bit", "renamed", "link", "empty", "cut", "edited", "writable", "open folder"],
)
def test_a_file_that_cannot_be_trusted_is_measured_again(
    starts: Starts, spoil: Callable[[Path], None]
) -> None:
    spoil(starts.file)
    assert starts.measures()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_measured_again(starts: Starts) -> None:
    os.chown(starts.file, 12345, -1)
    assert starts.measures()


def test_a_model_that_is_refused_is_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            HFModel(build("mamba", {}), kept_in=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    HFModel(build("llama", {}), kept_in=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, num_forwards: list[int]
) -> None:
    (tmp_path / "certified").write_text("a file, not a folder")
    assert Starts(tmp_path / "certified", num_forwards).measures()
