"""In which dtype a model comes whose caller has not chosen one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvboost.models import numerics
from kvboost.models.load import load
from tiny_models import save

pytestmark = pytest.mark.tiny

SAID = (
    "weights are bfloat16; this CPU has no bfloat16 instructions: using float32, twice the memory"
)
XEON = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n"
OLDER = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx512f avx512_vnni\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm\n"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this machine says about its CPU, to be written."""
    monkeypatch.setattr(numerics, "INFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


def saved(folder: Path, dtype: torch.dtype) -> str:
    name = save(folder)
    AutoModelForCausalLM.from_pretrained(name, dtype=dtype).save_pretrained(name)
    return name


@pytest.mark.parametrize(
    ("told", "has_it"), [(XEON, True), (OLDER, False), (GRAVITON, True), (ARM, False)]
)
def test_a_cpu_says_what_it_has(cpu: Path, told: str, has_it: bool) -> None:
    cpu.write_text(told)
    assert numerics.has_bfloat16() is has_it


def test_a_mac_is_believed_to_have_it(cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics.platform, "machine", lambda: "arm64")
    assert numerics.has_bfloat16()


@pytest.mark.parametrize("arguments", [{}, {"dtype": "auto"}])
def test_bfloat16_becomes_float32_where_it_would_be_emulated(
    cpu: Path, tmp_path: Path, arguments: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", torch.bfloat16)
    cpu.write_text(OLDER)
    assert load(folder, None, arguments)[0].dtype == torch.float32
    assert caplog.messages == [SAID]
    cpu.write_text(XEON)
    assert load(folder, "cpu", arguments)[0].dtype == torch.bfloat16
    assert caplog.messages == [SAID]


@pytest.mark.parametrize("chosen", [torch.bfloat16, "bfloat16", torch.float16])
def test_a_dtype_that_was_chosen_stays(
    cpu: Path, tmp_path: Path, chosen: object, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", torch.bfloat16)
    cpu.write_text(OLDER)
    wanted = getattr(torch, chosen) if isinstance(chosen, str) else chosen
    assert load(folder, None, {"dtype": chosen})[0].dtype == wanted
    assert caplog.messages == []


def test_other_dtypes_and_streamed_weights_stay_as_they_are_stored(
    cpu: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cpu.write_text(OLDER)
    half = saved(tmp_path / "half", torch.float16)
    assert load(half, None, {})[0].dtype == torch.float16
    streamed = saved(tmp_path / "model", torch.bfloat16)
    assert load(streamed, None, {}, max_weight_bytes=2**20)[0].dtype == torch.bfloat16
    assert caplog.messages == []
