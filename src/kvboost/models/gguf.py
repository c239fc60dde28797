"""GGUF files: how one is named, and what Transformers leaves in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import cached_file

from kvboost.errors import ConfigError, missing_packages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUFFIX = ".gguf"
NOT_FOR_FILES = ("gguf_file", "trust_remote_code")


def split_path(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path of a GGUF file as its folder and `gguf_file`; anything else as it is.

    Raises:
        ConfigError: there is no such file, or what reads it is not installed.
    """
    if name.endswith(SUFFIX) and not arguments.get("gguf_file"):
        if not Path(name).is_file():
            raise ConfigError(f"model={name!r}: there is no such file")
        name, arguments = str(Path(name).parent), {**arguments, "gguf_file": Path(name).name}
    if arguments.get("gguf_file"):
        missing = [each for each in ("gguf", "accelerate") if not importlib.util.find_spec(each)]
        if missing:
            raise ConfigError(
                missing_packages(f"gguf_file={arguments['gguf_file']!r}", " ".join(missing))
            )
        if Path(name).is_dir():
            # Transformers takes the weights of a file of this name in the working folder first.
            path = Path(name, arguments.get("subfolder") or "", arguments["gguf_file"])
            arguments = {**arguments, "gguf_file": str(path.absolute())}
    return name, arguments


def follow(
    name: str,
    arguments: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Let both do what the file says and Transformers does not read: begin with BOS, end a turn."""
    where = {key: value for key, value in arguments.items() if key not in NOT_FOR_FILES}
    metadata, _ = read_gguf_metadata(cached_file(name, arguments["gguf_file"], **where))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is not None and adds_bos != tokenizer.add_bos_token:
        tokenizer.add_bos_token = adds_bos
    end_of_turn = metadata.get("tokenizer.ggml.eot_token_id")
    settings = model.generation_config
    known = settings.eos_token_id
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end_of_turn is not None and end_of_turn not in ends:
        settings.eos_token_id = [*ends, end_of_turn]
