"""Does the LM Evaluation Harness score the same, and how long does it take? `hf` beside `kvboost`.

Few-shot tasks over local files. Time is that of the model's answers alone; each run has a process
of its own, which has not seen the prompts before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.material import dtype_name
from benchmarks.common.measure import Row, in_process, turns
from benchmarks.quality.evaluation_tasks import make_tasks

WORKER = Path(__file__).parent / "evaluation_worker.py"
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "hf": ("hf", {}),
    "off": ("kvboost", {"reuse": "off"}),
    "exact": ("kvboost", {"reuse": "exact"}),
    "auto": ("kvboost", {"reuse": "auto"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--limit", type=int, default=40, help="questions of each task")
    parser.add_argument("--data", type=Path, help="folder with nq-open-oracle.jsonl.gz")
    parser.add_argument("--with", nargs="+", choices=MODELS, default=["hf", "off", "exact"],
                        dest="models", help="models to run, in turns")  # fmt: skip


def run(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        names = make_tasks(Path(folder), options.shots, options.data)
        yield from _compare(names, folder, options)


def _compare(names: list[str], folder: str, options: argparse.Namespace) -> Iterator[Row]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    scores: dict[tuple[str, str], dict[str, float]] = {}
    common = {"tasks": names, "folder": folder, "limit": options.limit}
    for _, kind in turns(options.models, options.rounds):
        name, own = MODELS[kind]
        arguments = {"pretrained": options.model, "dtype": dtype_name(options), **own}
        outcomes = in_process(WORKER, {"name": name, "arguments": arguments, **common})
        for task, (score, seconds) in outcomes.items():
            scores[task, kind] = score
            times[task, kind].append(seconds)
    for task in names:
        for kind in options.models:
            row = {"task": task, "with": kind, "shots": options.shots, "limit": options.limit}
            row |= {"seconds": round(statistics.median(times[task, kind]), 2)}
            yield row | scores[task, kind]
