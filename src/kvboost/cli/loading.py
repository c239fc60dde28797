"""From flags to an engine, and errors of loading in a line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.errors import ConfigError, KVBoostError

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
    sys.stderr.write(f"loading {options.model} ...\n")
    sys.stderr.flush()
    from kvboost.models.load import load  # noqa: PLC0415  (loads torch)

    arguments = {"dtype": options.dtype}
    if options.gguf_file:
        arguments["gguf_file"] = options.gguf_file
    with named(options.model, (OSError, ValueError, AssertionError)):
        return load(options.model, options.device, arguments)


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


@contextmanager
def named(model: str, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Make a line of the paragraphs that Transformers raises, with the model's name.

    `kinds` are what it raises: an OSError for what it does not find, ValueErrors for what it cannot
    read; an AssertionError is torch's way to say that it has no CUDA.

    Raises:
        ConfigError: a model could not be loaded.
    """
    try:
        yield
    except KVBoostError:
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of a file or a socket, and short
        raise ConfigError(f"model {model!r}: {_why(model, error)}") from error


def _why(model: str, error: Exception) -> str:
    path = Path(model).expanduser()
    is_bare = path.is_dir() and not (path / "config.json").exists()
    if is_bare and ".gguf" not in str(error):
        return "the folder has no config.json; if it has GGUF files, name one with --gguf-file"
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and not path.exists():
        return "there is no such folder or file"
    said = str(error).partition("\n")[0].strip().rstrip(".") or type(error).__name__
    if isinstance(error, OSError):
        said += "; give a folder, a GGUF file, or a name on the hub while there is a connection"
    return said


def read(name: str) -> str:
    """The text of a file; "-" is standard input."""
    return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
