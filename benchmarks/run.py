"""One entry to all measurements: a table for people, and as the last line one JSON document.

python benchmarks/run.py speed --model FOLDER [FOLDER ...] --dtype bf16 --rounds 5

`bench` is `kvboost bench`: all systems side by side, and the report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# Before torch loads: threads that spin at barriers stall each other when cores are busy. Batches
# have many barriers and are faster with it on a quiet machine, which comparisons want anyway.
if not {"throughput", "bench"} & set(sys.argv):
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "scripts")]

from transformers.utils import logging

import evaluation
import eviction
import fleet
import footprint
import found
import fuzz
import identity
import inside_vllm
import isolation
import kvbytes
import lookup
import memory
import mixed
import multiturn
import pieces
import quality
import quantised
import restart
import route
import scale
import sessions
import shared
import soak
import speculation
import speed
import stalls
import streaming
import threads
import throughput
from get_model import get_model
from kvboost.cli.main import main as kvboost_command
from measure import environment

QUESTIONS = {
    "speed": speed,
    "identity": identity,
    "found": found,
    "lookup": lookup,
    "pieces": pieces,
    "quality": quality,
    "codecs": quantised,
    "mixed": mixed,
    "multiturn": multiturn,
    "sessions": sessions,
    "speculation": speculation,
    "threads": threads,
    "restart": restart,
    "route": route,
    "isolation": isolation,
    "shared": shared,
    "eviction": eviction,
    "lm_eval": evaluation,
    "scale": scale,
    "footprint": footprint,
    "throughput": throughput,
    "stalls": stalls,
    "kvbytes": kvbytes,
    "memory": memory,
    "soak": soak,
    "fuzz": fuzz,
    "streaming": streaming,
    "vllm": inside_vllm,
    "fleet": fleet,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="question", required=True)
    for name, module in QUESTIONS.items():
        command = commands.add_parser(name, help=module.__doc__, description=module.__doc__)
        command.add_argument("--rounds", type=int, default=5)
        if module not in (eviction, footprint, scale, shared, soak, fuzz, streaming):
            command.add_argument("--model", nargs="+", help="names or folders (default: SmolLM2)")
            command.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
        module.add_arguments(command)
    return parser


def main() -> None:
    if sys.argv[1:2] == ["bench"]:
        sys.exit(kvboost_command(sys.argv[1:]))
    logging.disable_progress_bar()
    options = make_parser().parse_args()
    if "model" in options:
        options.model = options.model or [str(get_model())]
    rows = QUESTIONS[options.question].run(options)
    print(json.dumps({"question": options.question, **environment(), "rows": rows}))
    if any(row.get("violations") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
