"""How much do many get at once? New tokens a second, beside Transformers and vLLM, by turns.

The workers are those of `kvboost bench`. Every round has texts of its own, so the prefix that its
prompts share is computed within the clock, once by who can. The warm figures are the same prefix
again with other endings.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.material import stream, tokenizer
from benchmarks.common.measure import Row, median_ratio
from kvboost.bench.clock import seconds
from kvboost.bench.systems import SYSTEMS, System, WorkerProcess

REFERENCE = "transformers"
PEERS = ("transformers", "cb", "vllm")
WITH_CACHE = ("ours", "vllm")
GOALS = {"transformers": 6.0, "cb": 1.5, "vllm": 1.5}
WARM_UP_TOKENS = 4
WARM = " warm"  # behind the name of who is asked for the second time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=16, help="prompts at once")
    parser.add_argument("--shared", type=int, default=1024, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=50, help="tokens of each prompt alone")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--peers", default=",".join(PEERS[:2]), help=f"of {','.join(PEERS)}")
    parser.add_argument("--prepack", action="store_true", help="ours with prepack_weights=True")
    parser.add_argument("--vllm-python", help="a Python that has vLLM installed")
    parser.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile")


def run(options: argparse.Namespace) -> Iterator[Row]:
    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"--peers {','.join(unknown)}: known are {', '.join(PEERS)}")
    if "vllm" in peers and not options.vllm_python:
        raise SystemExit("--peers vllm needs --vllm-python")
    with _workers(peers, options) as workers:
        times, answers = _measure(workers, options)
        for row in _rows(times, answers, options):
            yield row | {"versions": workers[row["who"].removesuffix(WARM)].versions}


@contextlib.contextmanager
def _workers(peers: list[str], options: argparse.Namespace) -> Iterator[dict[str, WorkerProcess]]:
    given = {
        "model": options.model,
        "dtype": options.dtype,
        "num_threads": torch.get_num_threads(),
        "num_prompts": options.clients,
        "max_tokens": options.shared + options.own + options.new + 1,
    }
    systems = _systems(options)
    started: dict[str, WorkerProcess] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # vLLM first: when it measures the free memory it has most of it.
        for who in sorted(("ours", *peers), key=lambda who: who != "vllm"):
            python = Path(options.vllm_python if who == "vllm" else sys.executable)
            log = Path(folder) / f"{who}.log"
            started[who] = WorkerProcess(systems[who], python, given, log)
            stack.callback(started[who].close)
            print(f"{who} is up: {started[who].versions}", flush=True)
        yield {who: started[who] for who in ("ours", *peers)}


def _systems(options: argparse.Namespace) -> dict[str, System]:
    ours = {"max_batch_size": options.clients, "prepack_weights": options.prepack}
    return {
        "ours": replace(SYSTEMS["kvboost-exact"], settings={"options": ours}),
        "transformers": SYSTEMS["transformers"],
        "cb": SYSTEMS["transformers-cb"],
        "vllm": replace(SYSTEMS["vllm"], settings={"eager": options.vllm_eager}),
    }


def _measure(
    workers: Mapping[str, WorkerProcess], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    words = tokenizer(options.model)
    times: dict[str, list[float]] = defaultdict(list)
    answers: dict[str, list[list[int]]] = defaultdict(list)

    def answer(who: str, prompts: list[list[int]], num_new: int, note: str = "") -> None:
        requests = [{"at_s": 0.0, "tokens": each, "num_new": num_new} for each in prompts]
        got: list[list[int]] = []

        def serve() -> None:
            got.extend(served["tokens"] for served in workers[who].traffic(requests))
            if who == "ours":  # what they left is stored before the clock stops
                workers[who].rest()

        took = seconds(serve)
        if [len(tokens) for tokens in got] != [num_new] * len(prompts):
            raise RuntimeError(f"{who}: answers have {[len(tokens) for tokens in got]} tokens")
        times[who + note].append(took)
        answers[who + note] += got
        print(f"  {who + note}: {took:.1f} s", flush=True)

    warm_up = _prompts(words, options, seed=0)
    for who in workers:
        answer(who, warm_up[:1] if who == REFERENCE else warm_up, WARM_UP_TOKENS)
    times.clear()
    answers.clear()
    for turn in range(options.rounds):
        prompts = _prompts(words, options, seed=2 * turn + 1)
        again = _prompts(words, options, seed=2 * turn + 1, own_seed=2 * turn + 2)
        order = list(workers)
        for who in order[turn % len(order) :] + order[: turn % len(order)]:
            answer(who, prompts, options.new)
            if who in WITH_CACHE:
                answer(who, again, options.new, WARM)
    return dict(times), dict(answers)


def _prompts(
    words: Any, options: argparse.Namespace, seed: int, own_seed: int | None = None
) -> list[list[int]]:
    shared = stream(words, options.shared, seed)
    first = 1000 * (1 + (seed if own_seed is None else own_seed))
    return [shared + stream(words, options.own, first + n) for n in range(options.clients)]


def _rows(
    times: dict[str, list[float]],
    answers: dict[str, list[list[int]]],
    options: argparse.Namespace,
) -> list[Row]:
    """A row for each who; ratios are medians of the rounds' ratios."""
    num_tokens = options.clients * options.new
    rows = []
    for who, took in times.items():
        row: Row = {"who": who, "clients": options.clients, "new": options.new}
        row |= {"shared": options.shared, "own": options.own, "rounds": len(took)}
        row["tokens_per_s"] = round(num_tokens / statistics.median(took), 2)
        row["low"] = round(num_tokens / max(took), 2)
        row["high"] = round(num_tokens / min(took), 2)
        if not who.startswith("ours"):
            ours = times["ours" + WARM if who.endswith(WARM) else "ours"]
            row["ours_ratio"] = median_ratio(took, ours)
            row |= {"goal": GOALS[who]} if who in GOALS else {}
        if REFERENCE in answers and who != REFERENCE and not who.endswith(WARM):
            pairs = zip(answers[who], answers[REFERENCE], strict=True)
            row["same"] = sum(a == b for a, b in pairs)
            row["answers"] = len(answers[who])
        rows.append(row)
    return rows
