"""Does memory stay in its budget? Threads that store and load ten times as much as it holds."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from kvboost.build import build_store
from kvboost.config import MIB, Options
from kvboost.core import KVGeometry, PlaneGroup, Span
from kvboost.metrics import Metrics
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.store import commit

GEOMETRY = KVGeometry(30, (PlaneGroup(tuple(range(60)), 3, 64),), "bfloat16", 2)  # of SmolLM2
TOKENS = 512  # of a prompt: 12 MB


class Rows:
    """The K/V of a prompt, without a model."""

    exact_stop = sys.maxsize

    def __init__(self) -> None:
        self._rows = torch.randn(60, 3, TOKENS, 64).to(torch.bfloat16)

    def read(self, span: Span) -> list[torch.Tensor]:
        return [self._rows[:, :, span.start : span.stop]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--budget", type=int, default=500, help="MiB of the memory tier")
    parser.add_argument("--times", type=float, default=10, help="traffic, in budgets")
    parser.add_argument("--cache-url", help="also with these tiers below memory")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        below = [None, f"file://{folder}", *([options.cache_url] if options.cache_url else [])]
        for url in below:
            rows.append(_measure(url, options))
            row = rows[-1]
            print(
                f"below memory: {row['below']}; {row['stored_mb']:.0f} MB stored and"
                f" {row['loaded_mb']:.0f} MB loaded by {options.threads} threads in"
                f" {row['seconds']:.0f} s: memory grew by {row['grown_mb']:.0f} MB,"
                f" {row['grown_mb'] / options.budget:.3f} of the budget"
            )
    return rows


def _measure(url: str | None, options: argparse.Namespace) -> dict[str, Any]:
    store = build_store(
        Options(max_cache_bytes=options.budget * MIB, cache_url=url, max_disk_bytes=4096 * MIB),
        GEOMETRY,
        Metrics(),
    )
    sources = [Rows() for _ in range(options.threads)]
    prompt_mb = TOKENS * GEOMETRY.bytes_per_token / MIB
    num_prompts = round(options.times * options.budget / prompt_mb / options.threads)
    before, peak, is_over = _own_mb(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], _own_mb())

    loaded = [0] * options.threads

    def work(number: int) -> None:
        chance = random.Random(number)
        for turn in range(num_prompts):
            space = namespace(b"model", str(number), None)
            for tokens in ([turn] * TOKENS, [chance.randrange(turn + 1)] * TOKENS):
                chunks = split(tokens, 128)
                keys = derive(chunks, space)
                names = [key.prefix for key in keys]
                store.bring(names, store.tiers.patience(), in_order=True)
                found = store.tiers.get(names)
                loaded[number] += sum(frame.nbytes for frame in found.values())
                del found
                commit(sources[number], chunks, keys, space, store)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(options.threads)]
    watcher = threading.Thread(target=watch)
    started = time.perf_counter()
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    watcher.join()
    counts = store.metrics.snapshot()
    store.tiers.close()
    return {
        "below": "nothing" if url is None else url.split(":")[0],
        "budget_mb": options.budget,
        "grown_mb": round(peak[0] - before, 1),
        "stored_mb": round(counts["stored_chunks"] * 128 * GEOMETRY.bytes_per_token / MIB),
        "loaded_mb": round(sum(loaded) / MIB),
        "seconds": round(time.perf_counter() - started, 1),
        "dropped_writes": counts["dropped_writes"],
    }


def _own_mb() -> float:
    """Memory of this process that is not the system's file cache (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc/self/status")
