"""One entry to all measurements: rows as they come, and as the last line one JSON document.

python benchmarks/run.py speed --model FOLDER [FOLDER ...] --dtype bf16 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

# Before torch loads: threads that spin at barriers stall each other when cores are busy. Batches
# have many barriers and are faster with it on a quiet machine, which comparisons want anyway.
if "throughput" not in sys.argv:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).parents[1]
WIDEST = 80  # letters of a value on the screen
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from transformers.utils import logging

from benchmarks.common.measure import Row, environment
from get_model import get_model

QUESTIONS = {
    "speed": "latency.speed",
    "identity": "quality.identity",
    "found": "quality.found",
    "quality": "quality.repairs",
    "codecs": "quality.quantised",
    "mixed": "latency.mixed",
    "multiturn": "latency.multiturn",
    "sessions": "latency.sessions",
    "speculation": "latency.speculation",
    "restart": "storage.restart",
    "route": "serving.route",
    "isolation": "storage.isolation",
    "lm_eval": "quality.evaluation",
    "throughput": "serving.throughput",
    "stalls": "serving.stalls",
    "kvbytes": "serving.kvbytes",
    "vllm": "serving.inside_vllm",
    "fleet": "fleet.replicas",
}
WITHOUT_MODEL = {
    "lookup": "storage.lookup",
    "shared": "storage.shared",
    "eviction": "storage.eviction",
    "footprint": "storage.footprint",
    "scale": "fleet.scale",
    "soak": "serving.soak",
    "streaming": "weights.streaming",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="question", required=True)
    for name, place in {**QUESTIONS, **WITHOUT_MODEL}.items():
        module = import_module(f"benchmarks.{place}")
        command = commands.add_parser(name, help=module.__doc__, description=module.__doc__)
        command.set_defaults(run=module.run)
        command.add_argument("--rounds", type=int, default=5)
        if name in QUESTIONS:
            command.add_argument("--model", nargs="+", help="names or folders (default: SmolLM2)")
            command.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
        module.add_arguments(command)
    return parser


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of a question; one about a model is asked of each model by itself."""
    if "model" not in options:
        yield from options.run(options)
        return
    for name in options.model or [str(get_model())]:
        options.model = name
        about = {"model": Path(name).name, "dtype": options.dtype}
        for row in options.run(options):
            yield about | row


def main() -> None:
    logging.disable_progress_bar()
    options = make_parser().parse_args()
    found = []
    for row in rows(options):
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
        print("".join(f"VIOLATED: {each}\n" for each in row.get("violations", ())), end="")
        found.append(row)
    print(json.dumps({"question": options.question, **environment(), "rows": found}))
    if any(row.get("violations") for row in found):
        sys.exit(1)


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)[:WIDEST]


if __name__ == "__main__":
    main()
