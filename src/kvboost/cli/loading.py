"""From flags to an engine."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.config import make_options
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvboost.engine.engine import KVBoost

ENGINE_FLAGS = ("reuse", "disk_cache_dir", "cache_url", "cache_secret", "chunk_size")


@contextmanager
def loaded(options: argparse.Namespace) -> Iterator[KVBoost]:
    """An engine with the flags that were given, until the block ends.

    Raises:
        KVBoostError: the model cannot be loaded, or its K/V cannot be reused.
    """
    with hosted(options, *load_model(options)) as engine:
        yield engine


def load_model(
    options: argparse.Namespace,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, by the flags of `add_model`.

    Raises:
        ConfigError: there is no such model, or it cannot be loaded.
    """
    try:
        make_options(_given(options))
    except ConfigError as error:
        options.fail(str(error))
    quieten()
    started = time.perf_counter()
    _say(f"loading {options.model} ...")
    with _no_collections():
        from kvboost.models.load import load_or_tell  # noqa: PLC0415  (loads torch)

        arguments = {"dtype": options.dtype}
        if options.gguf_file:
            arguments["gguf_file"] = options.gguf_file
        found = load_or_tell(options.model, options.device, arguments)
    _say(f"loading {options.model}: {time.perf_counter() - started:.1f} s")
    return found


@contextmanager
def _no_collections() -> Iterator[None]:
    """Exempt the objects of a block from garbage collection, now and at exit.

    Importing torch and Transformers creates half a million objects that all live until the end:
    searching them for garbage takes a quarter of the time of import and exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def hosted(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> KVBoost:
    """An engine around a model, with the flags that were given."""
    import torch  # noqa: PLC0415

    from kvboost.engine.engine import KVBoost  # noqa: PLC0415

    if getattr(options, "seed", None) is not None:
        torch.manual_seed(options.seed)
    started = time.perf_counter()
    engine = KVBoost(model, tokenizer, **_given(options))
    _say(f"certification: {time.perf_counter() - started:.1f} s")
    return engine


def quieten() -> None:
    """Hide progress bars and warnings of Transformers, unless they are asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def read(name: str) -> str:
    """The text of a file; "-" is standard input."""
    return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")


def read_document(name: str) -> str:
    """The text of a file without white space around it, which some chat templates remove."""
    return read(name).strip()


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ENGINE_FLAGS if hasattr(options, name)}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
