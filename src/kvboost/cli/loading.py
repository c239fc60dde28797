"""From flags to an engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvboost.engine.engine import KVBoost

ENGINE_FLAGS = ("reuse", "disk_cache_dir", "cache_url")


@contextmanager
def loaded(options: argparse.Namespace, **more: Any) -> Iterator[KVBoost]:
    """An engine with the flags that were given, until the block ends; `more` are its options.

    Raises:
        KVBoostError: the model cannot be loaded, or its K/V cannot be reused.
    """
    with hosted(options, *load_model(options), **more) as engine:
        yield engine


def load_model(
    options: argparse.Namespace,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, as the flags of `add_model` say.

    Raises:
        ConfigError: there is no such model, or it cannot be loaded.
    """
    quieten()
    sys.stderr.write(f"loading and certifying {options.model} ...\n")
    sys.stderr.flush()
    from kvboost.models.load import load_or_tell  # noqa: PLC0415  (loads torch)

    arguments = {"dtype": options.dtype}
    if options.gguf_file:
        arguments["gguf_file"] = options.gguf_file
    return load_or_tell(options.model, options.device, arguments)


def hosted(
    options: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **more: Any,
) -> KVBoost:
    """An engine around a model, with the flags that were given."""
    from kvboost.engine.engine import KVBoost  # noqa: PLC0415

    given = {name: getattr(options, name) for name in ENGINE_FLAGS if hasattr(options, name)}
    return KVBoost(model, tokenizer, **given, **more)


def quieten() -> None:
    """No bars and warnings of Transformers between what a command says, unless they are wanted."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def read(name: str) -> str:
    """The text of a file; "-" is standard input."""
    return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
