"""Files of others, which would run code if they were let: nothing of it runs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from kvboost import ConfigError, KVBoost
from kvboost.config import Options
from kvboost.server.options import ServerOptions
from tiny_models import save

pytestmark = pytest.mark.tiny


class Trap:
    """Unpickled without care, makes a folder."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._target),)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tmp_path_factory.mktemp("untrusted")))


def copied(original: Path, folder: Path, *, without: str = "") -> Path:
    folder.mkdir()
    for path in original.iterdir():
        if path.name != without:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_traps_work(tmp_path: Path, sprung: Path) -> None:
    torch.save(Trap(sprung), tmp_path / "trap")
    torch.load(tmp_path / "trap", weights_only=False)
    assert sprung.exists()


def test_code_of_a_model_is_not_run(original: Path, tmp_path: Path, sprung: Path) -> None:
    folder = copied(original, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.TrapConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text(
        "import os\nfrom transformers import PreTrainedConfig\n"
        f"os.mkdir({str(sprung)!r})\nclass TrapConfig(PreTrainedConfig): pass\n"
    )
    with pytest.raises(ValueError, match="pass trust_remote_code=True"):
        KVBoost.from_pretrained(str(folder))
    assert not sprung.exists()


def test_pickled_weights_run_no_code(original: Path, tmp_path: Path, sprung: Path) -> None:
    folder = copied(original, tmp_path / "model", without="model.safetensors")
    torch.save({"model.norm.weight": Trap(sprung)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        KVBoost.from_pretrained(str(folder))
    assert not sprung.exists()


def test_a_pickled_adapter_runs_no_code(original: Path, tmp_path: Path, sprung: Path) -> None:
    folder = tmp_path / "adapter"
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(str(folder))
    torch.save({"lora": Trap(sprung)}, folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="adapter 'a'"):
        KVBoost.from_pretrained(str(original), adapters={"a": str(folder)})
    assert not sprung.exists()


def test_the_server_cannot_be_told_to_run_code_of_models() -> None:
    names = {each.name for kind in (ServerOptions, Options) for each in dataclasses.fields(kind)}
    assert "trust_remote_code" not in names
