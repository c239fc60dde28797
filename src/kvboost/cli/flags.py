"""Flags that several commands have: one name, one help text and one default for each.

Each has a KVBOOST_* variable, the same as the server's; a flag wins over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any, get_args

from kvboost.config import SHORT_DTYPES, Options
from kvboost.core import ReuseMode

WIDTH = 90  # of descriptions
DTYPES = ("auto", "float32", "bfloat16", "float16")


def about(parser: argparse.ArgumentParser, text: str, *examples: str) -> None:
    """Say what a command does, with examples."""
    parser.description = textwrap.fill(text, WIDTH)
    parser.set_defaults(fail=parser.error)
    if examples:
        parser.epilog = "\n".join(["examples:", *(f"  {each}" for each in examples)])


def add_model(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Flags for the model and how it is loaded."""
    add_model_name(parser, is_required=is_required)
    _add(
        parser,
        "gguf_file",
        "GGUF file in the folder or repository of --model",
        metavar="FILE",
    )
    text = "of the weights; auto: as stored, but float32 for bfloat16 on CPUs without it"
    add_dtype(parser, DTYPES, text, "auto")
    _add(
        parser,
        "device",
        "cpu, cuda, cuda:1 ...; default: a GPU if there is one",
        metavar="DEVICE",
    )


def add_model_name(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """--model."""
    _add(
        parser,
        "model",
        "name, folder or GGUF file of the model",
        metavar="MODEL",
        required=is_required and not os.environ.get("KVBOOST_MODEL"),
    )


def add_dtype(
    parser: argparse.ArgumentParser, choices: tuple[str, ...], text: str, default: str
) -> None:
    """--dtype, also by the short names bf16, fp16 and fp32."""
    chosen = _one_of(choices, SHORT_DTYPES)
    _add(parser, "dtype", text, default=default, type=chosen, choices=choices)


def add_reuse(parser: argparse.ArgumentParser, choices: tuple[str, ...] | None = None) -> None:
    """--reuse."""
    modes = choices or get_args(ReuseMode)
    text = (
        "exact: reuse what a prompt begins with; auto: also text at other positions, approximately"
    )
    _add(parser, "reuse", text, default="exact", type=_one_of(modes), choices=modes)


def add_tiers(parser: argparse.ArgumentParser, *, reads: bool = True) -> None:
    """Flags for tiers that outlive the process; a secret where stored K/V is read."""
    _add(parser, "disk_cache_dir", _help_of("disk_cache_dir"), metavar="FOLDER")
    _add(parser, "cache_url", _help_of("cache_url"), metavar="URL")
    if reads:
        _add(parser, "cache_secret", _help_of("cache_secret"), metavar="SECRET")


def add_answer(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Flags for the length of an answer, and for sampling."""
    add_max_new_tokens(parser, max_new_tokens)
    add = parser.add_argument
    number = _number("a number of at least 0", least=0.0)
    text = "0 is greedy; higher values sample (default: 0)"
    add("--temperature", type=number, metavar="T", help=text)
    share = _number("a number above 0, at most 1", least=1e-9, most=1.0)
    text = "sample from the most likely tokens that together have this probability"
    add("--top-p", type=share, metavar="P", help=text)
    add("--top-k", type=_count, metavar="K", help="sample from the K most likely tokens")
    add("--seed", type=int, metavar="N", help="seed of sampling: the same seed, the same answer")


def add_max_new_tokens(parser: argparse.ArgumentParser, default: int) -> None:
    """--max-new-tokens."""
    parser.add_argument(
        "--max-new-tokens",
        type=_count,
        default=default,
        metavar="N",
        help=f"limit of an answer, in tokens (default: {default})",
    )


def add_files(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """A flag that names a file, and may be repeated."""
    parser.add_argument(
        flag, action="append", default=[], metavar="FILE", help=f"{text}; may be repeated"
    )


def add_json(parser: argparse.ArgumentParser, text: str = "print the result as JSON") -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help=text)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of `add_answer` as arguments of `generate` and `stream`."""
    names = ("temperature", "top_p", "top_k")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    does_sample = given["temperature"] > 0 if "temperature" in given else bool(given)
    chosen = {"max_new_tokens": options.max_new_tokens, "do_sample": does_sample}
    return chosen | (given if does_sample else {})


def _add(parser: argparse.ArgumentParser, name: str, text: str, **given: Any) -> None:
    variable = f"KVBOOST_{name.upper()}"
    default = given.pop("default", None)
    notes = [f"default: {default}"] if default else []
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        default=os.environ.get(variable) or default,
        help=f"{text} ({'; '.join([*notes, variable])})",
        **given,
    )


def _help_of(name: str) -> str:
    found = next(each for each in dataclasses.fields(Options) if each.name == name)
    return str(found.metadata["help"])


def _one_of(choices: tuple[str, ...], others: dict[str, str] | None = None) -> Callable[[str], str]:
    # argparse compares flags with `choices`, but not defaults, which may come from variables.
    def chosen(text: str) -> str:
        word = (others or {}).get(text, text)
        if word not in choices:
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(choices)}")
        return word

    return chosen


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def _number(
    expected: str, least: float, most: float = sys.float_info.max
) -> Callable[[str], float]:
    def chosen(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return number

    return chosen
