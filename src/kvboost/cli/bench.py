"""`kvboost bench`: KVBoost beside other systems on this machine, and the report of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterable
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
from kvboost.errors import ConfigError

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
        "Measures workloads times systems in alternating rounds, with the clock of the caller, "
        "judges every answer, and writes a page.",
        "kvboost bench setup",
        "kvboost bench run --model FOLDER --quick --out bench",
        "kvboost bench report bench",
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    _add_setup(parts)
    _add_run(parts)
    text = "write the page and the summary of a run anew"
    report = parts.add_parser("report", help=text)
    flags.about(report, f"{text.capitalize()}.", "kvboost bench report bench")
    report.set_defaults(run=_report)
    report.add_argument("out", type=Path, metavar="FOLDER", help="folder of the run")
    flags.add_json(report)


def _add_setup(parts: Parts) -> None:
    text = "make the virtual environments of the other systems (gigabytes, minutes)"
    setup = parts.add_parser("setup", help=text)
    flags.about(setup, f"{text.capitalize()}.", "kvboost bench setup", "kvboost bench setup vllm")
    setup.set_defaults(run=_setup)
    setup.add_argument(
        "names", nargs="*", metavar="NAME", help="environments to make (default: all)"
    )
    flags.add_json(setup)


def _add_run(parts: Parts) -> None:
    run = parts.add_parser("run", help="measure; a run that was stopped goes on where it was")
    flags.about(
        run,
        "Measures; a run that was stopped goes on where it was. Systems whose environment is "
        "missing are left out, and the report says so.",
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
        help="where results and the page go (default: bench)",
    )
    run.add_argument(
        "--quick", action="store_true", help="a part of it, in minutes: few systems, no traffic"
    )
    run.add_argument(
        "--rounds", type=int, metavar="N", help=f"default: {ROUNDS}, quick: {QUICK_ROUNDS}"
    )
    run.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of texts and orders (default: 0)"
    )
    run.add_argument("--systems", nargs="+", metavar="NAME", help=f"of {', '.join(SYSTEMS)}")
    run.add_argument("--workloads", nargs="+", metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    run.add_argument("--questions", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    flags.add_json(run)


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
        systems=_known(options.systems or systems, SYSTEMS),
        workloads=_known(options.workloads or workloads, WORKLOADS),
        questions=_known(questions if options.questions is None else options.questions, QUESTIONS),
        is_quick=options.quick,
    )


def _known(names: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"{name!r} is none of {', '.join(known)}")
    return chosen
