"""`kvboost bench`: KVBoost beside other systems on this machine, and the report of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.bench.names import (
    QUESTIONS,
    QUICK_QUESTIONS,
    QUICK_SYSTEMS,
    QUICK_WORKLOADS,
    WORKLOADS,
)
from kvboost.bench.systems import SYSTEMS
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.bench.settings import Settings
    from kvboost.cli.main import Commands

ROUNDS, QUICK_ROUNDS = 2, 1
NUM_TOKENS, QUICK_TOKENS = 600, 300  # of the shared part of a prompt


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    bench = commands.add_parser(
        "bench",
        help="measure KVBoost beside other systems, with quality, and write a report",
        description="Measures workloads times systems in alternating rounds, with the clock of "
        "the caller, judges every answer, and writes a page.",
    )
    parts = bench.add_subparsers(dest="part", required=True)
    _add_setup(parts)
    _add_run(parts)
    report = parts.add_parser("report", help="write the page and the summary of a run anew")
    report.set_defaults(run=_report)
    report.add_argument("out", type=Path, help="folder of the run")


def _add_setup(parts: Commands) -> None:
    setup = parts.add_parser(
        "setup", help="make the virtual environments of the other systems (gigabytes, minutes)"
    )
    setup.set_defaults(run=_setup)
    setup.add_argument("names", nargs="*", help="environments to make (default: all)")


def _add_run(parts: Commands) -> None:
    run = parts.add_parser(
        "run",
        help="measure; a run that was stopped goes on where it was",
        description="Systems whose environment is missing are left out, and the report says so.",
    )
    run.set_defaults(run=_run)
    run.add_argument("--model", required=True, help="name or folder of the model")
    run.add_argument("--gguf", help="GGUF file of the same model, for llama.cpp")
    run.add_argument(
        "--data", help="folder with conversation_trace.jsonl (Mooncake), for mixed traffic"
    )
    run.add_argument("--out", type=Path, default=Path("bench"), help="folder (default: bench)")
    run.add_argument(
        "--quick", action="store_true", help="a part of it, in minutes: few systems, no traffic"
    )
    run.add_argument(
        "--dtype", default="bf16", choices=["bf16", "fp16", "fp32"], help="default: bf16"
    )
    run.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, quick: {QUICK_ROUNDS}")
    run.add_argument("--seed", type=int, default=0, help="of texts and orders (default: 0)")
    run.add_argument("--systems", nargs="+", metavar="NAME", help=f"of {', '.join(SYSTEMS)}")
    run.add_argument("--workloads", nargs="+", metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    run.add_argument("--questions", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")


def _setup(options: argparse.Namespace) -> int:
    from kvboost.bench.environments import RECIPES, make  # noqa: PLC0415

    for name in options.names or RECIPES:
        sys.stderr.write(f"{name}: ")
        sys.stderr.flush()
        sys.stderr.write(f"{make(name)}\n")
    return 0


def _run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kvboost.bench.run import run  # noqa: PLC0415  (loads numpy)

    run(_settings(options), options.out)
    return _say_where(options.out)


def _report(options: argparse.Namespace) -> int:
    from kvboost.bench.run import conclude  # noqa: PLC0415  (loads numpy)

    conclude(options.out)
    return _say_where(options.out)


def _say_where(folder: Path) -> int:
    sys.stdout.write(f"{folder / 'report.html'}\n{folder / 'report.md'}\n")
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    from kvboost.bench.settings import Settings  # noqa: PLC0415

    systems, workloads = (QUICK_SYSTEMS, QUICK_WORKLOADS) if options.quick else (SYSTEMS, WORKLOADS)
    questions = QUICK_QUESTIONS if options.quick else QUESTIONS
    return Settings(
        model=options.model,
        gguf=options.gguf,
        data=options.data,
        dtype=options.dtype,
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
