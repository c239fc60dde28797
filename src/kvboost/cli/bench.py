"""`kvboost bench`: compares KVBoost with other systems on this machine, and reports."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvboost.bench.names import (
    QUESTIONS,
    QUICK_QUESTIONS,
    QUICK_SYSTEMS,
    QUICK_WORKLOADS,
    WORKLOADS,
)
from kvboost.bench.systems import SYSTEMS
from kvboost.cli import flags

if TYPE_CHECKING:
    from kvboost.bench.settings import Settings

    Parts: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001

ROUNDS, QUICK_ROUNDS = 2, 1
NUM_TOKENS, QUICK_TOKENS = 600, 300  # of the shared part of a prompt
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # as results name them


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the parts and their flags."""
    flags.about(
        parser,
        "Runs workloads on several systems in alternating rounds, times them from outside, judges "
        "every answer, and writes a report.",
        "kvboost bench setup",
        "kvboost bench run --model FOLDER --quick --out bench",
        "kvboost bench report bench",
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    _add_setup(parts)
    _add_run(parts)
    text = "rewrite the report and the summary of a run"
    report = parts.add_parser("report", help=text)
    flags.about(report, f"{text.capitalize()}.", "kvboost bench report bench")
    report.set_defaults(run=_report)
    report.add_argument("out", type=Path, metavar="FOLDER", help="folder of the run")
    flags.add_json(report)


def _add_setup(parts: Parts) -> None:
    text = "create virtual environments for the other systems (gigabytes, minutes)"
    setup = parts.add_parser("setup", help=text)
    flags.about(setup, f"{text.capitalize()}.", "kvboost bench setup", "kvboost bench setup vllm")
    setup.set_defaults(run=_setup)
    setup.add_argument(
        "names", nargs="*", metavar="NAME", help="environments to create (default: all)"
    )
    flags.add_json(setup)


def _add_run(parts: Parts) -> None:
    run = parts.add_parser("run", help="measure; continues a run that was stopped")
    flags.about(
        run,
        "Measures; continues a run that was stopped. Systems without an environment are skipped, "
        "and the report says so.",
        "kvboost bench run --model FOLDER --quick --out bench",
        "kvboost bench run --model FOLDER --gguf FILE --data DATA --dtype fp32 --out report",
    )
    run.set_defaults(run=_run)
    flags.add_model_name(run)
    flags.add_dtype(run, tuple(DTYPES), "of the weights", "bfloat16")
    run.add_argument("--gguf", metavar="FILE", help="GGUF file of the same model, for llama.cpp")
    run.add_argument(
        "--data",
        metavar="FOLDER",
        help="folder with conversation_trace.jsonl (Mooncake), for mixed traffic",
    )
    run.add_argument(
        "--out",
        type=Path,
        default=Path("bench"),
        metavar="FOLDER",
        help="folder for results and the report (default: bench)",
    )
    run.add_argument(
        "--quick", action="store_true", help="a subset that takes minutes: few systems, no traffic"
    )
    run.add_argument(
        "--rounds", type=int, metavar="N", help=f"default: {ROUNDS}, quick: {QUICK_ROUNDS}"
    )
    run.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of texts and orders (default: 0)",
    )
    _add_names(run, "--systems", "+", SYSTEMS)
    _add_names(run, "--workloads", "+", WORKLOADS)
    _add_names(run, "--questions", "*", QUESTIONS)
    flags.add_json(run)


def _add_names(run: argparse.ArgumentParser, flag: str, count: str, known: Collection[str]) -> None:
    text = f"of {', '.join(known)}"
    run.add_argument(flag, nargs=count, choices=known, metavar="NAME", help=text)


def _setup(options: argparse.Namespace) -> int:
    from kvboost.bench.environments import RECIPES, make  # noqa: PLC0415

    pythons = {}
    for name in options.names or RECIPES:
        sys.stderr.write(f"{name}: ")
        sys.stderr.flush()
        pythons[name] = str(make(name))
        sys.stderr.write(f"{pythons[name]}\n")
    if options.json:
        sys.stdout.write(json.dumps(pythons, indent=2) + "\n")
    return 0


def _run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kvboost.bench.run import run  # noqa: PLC0415  (loads numpy)

    run(_settings(options), options.out)
    return _say_where(options)


def _report(options: argparse.Namespace) -> int:
    from kvboost.bench.run import conclude  # noqa: PLC0415  (loads numpy)

    conclude(options.out)
    return _say_where(options)


def _say_where(options: argparse.Namespace) -> int:
    pages = {"html": options.out / "report.html", "markdown": options.out / "report.md"}
    names = {kind: str(page) for kind, page in pages.items()}
    if options.json:
        sys.stdout.write(json.dumps(names, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{name}\n" for name in names.values()))
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    from kvboost.bench.settings import Settings  # noqa: PLC0415

    systems, workloads = (QUICK_SYSTEMS, QUICK_WORKLOADS) if options.quick else (SYSTEMS, WORKLOADS)
    questions = QUICK_QUESTIONS if options.quick else QUESTIONS
    return Settings(
        model=options.model,
        gguf=options.gguf,
        data=options.data,
        dtype=DTYPES[options.dtype],
        seed=options.seed,
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        num_tokens=QUICK_TOKENS if options.quick else NUM_TOKENS,
        systems=tuple(dict.fromkeys(options.systems or systems)),
        workloads=tuple(dict.fromkeys(options.workloads or workloads)),
        questions=tuple(
            dict.fromkeys(questions if options.questions is None else options.questions)
        ),
        is_quick=options.quick,
    )
