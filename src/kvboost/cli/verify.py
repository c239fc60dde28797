"""`kvboost verify`: whether reuse changes a model's answers, with the facts for a bug report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvboost import __version__
from kvboost.cli import flags
from kvboost.cli.loading import hosted, load_model, read
from kvboost.cli.prompts import add_raw, prompt_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost.engine.results import CorrectnessReport

MAX_NEW_TOKENS = 32


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Answers each prompt with and without reuse, and compares answers and logits. With --reuse "
        "auto each prompt reuses the K/V of the prompts before it, so pass prompts that share "
        "text. Exit code 1 if answers differ by more than the tolerance. Attach the JSON to a "
        "report of wrong output; it contains no text of your prompts.",
        "kvboost verify --model FOLDER",
        "kvboost verify prompt.txt other.txt --reuse auto --model FOLDER --json",
    )
    parser.set_defaults(run=_verify)
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="FILE",
        help="file with a prompt; - for standard input (default: built-in prompts)",
    )
    add_raw(parser)
    flags.add_model(parser)
    flags.add_max_new_tokens(parser, MAX_NEW_TOKENS)
    flags.add_reuse(parser, ("exact", "auto"))
    flags.add_tiers(parser)
    flags.add_json(parser)


def _verify(options: argparse.Namespace) -> int:
    texts = [read(name) for name in options.prompts]
    model, tokenizer = load_model(options)
    with hosted(options, model, tokenizer) as engine:
        tokens = [prompt_tokens(engine, text, raw=options.raw) for text in texts] or None
        report = engine.verify_correctness(tokens, options.max_new_tokens, reuse=options.reuse)
        facts = {**_facts(model), "fingerprint": engine.fingerprint}
    page = {
        "holds": bool(report),
        "verdict": str(report),
        "reuse": options.reuse,
        **dataclasses.asdict(report),
        "model": {"name": options.model, **facts},
        "versions": _versions(),
    }
    if options.json:
        sys.stdout.write(json.dumps(page, indent=2) + "\n")
    else:
        _print(report, page)
    return 0 if report else 1


def _facts(model: PreTrainedModel) -> dict[str, str]:
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def _versions() -> dict[str, str]:
    return {
        "kvboost": __version__,
        **{name: version(name) for name in ("transformers", "torch")},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _print(report: CorrectnessReport, page: dict[str, Any]) -> None:
    for number, check in enumerate(report.checks, 1):
        place = check.first_difference
        told = "same answer" if place is None else f"answers differ from token {place}"
        sys.stdout.write(
            f"prompt {number}: {told}; KL {check.mean_kl:.2g}, at most {check.max_kl:.2g}; "
            f"{check.cached_tokens} of {check.prompt_tokens} tokens reused\n"
        )
    for name in ("model", "versions"):
        facts = ", ".join(f"{key} {value}" for key, value in page[name].items())
        sys.stdout.write(f"{name}: {facts}\n")
    sys.stdout.write(f"{report}\n")
