"""Is a shared prefix held once? Bytes of K/V that many running requests occupy together."""

from __future__ import annotations

import argparse
import threading
from typing import Any

from kvboost import KVBoost
from kvboost.core import Sampling
from material import DTYPES, model, stream, tokenizer

GOAL = 1.2
POLL_S = 0.001


class Peak:
    """The most that a batch occupied, and how many requests were running then."""

    def __init__(self, engine: KVBoost) -> None:
        self.size_bytes = self.num_running = self.most_running = 0
        self._engine = engine
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            stats = self._engine.batch_stats()
            self.most_running = max(self.most_running, stats["num_running"])
            if stats["kv_bytes"] > self.size_bytes:
                self.size_bytes, self.num_running = stats["kv_bytes"], stats["num_running"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=2048, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=50, help="tokens of each prompt alone")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        host = model(name, DTYPES[options.dtype])
        with KVBoost(host, words, max_batch_size=options.requests) as engine:
            for what in ("cold", "warm"):
                row = {"model": name.rstrip("/").split("/")[-1], "dtype": options.dtype}
                rows.append(row | {"prefix": what} | _measure(engine, words, what, options))
                row = rows[-1]
                print(
                    f"{row['model']}: {options.requests} requests, prefix {what}: at most"
                    f" {row['peak_mb']:.1f} MB, prefix once and own tokens {row['least_mb']:.1f}"
                    f" MB: {row['ratio']:.3f} (goal {GOAL}); each by itself {row['apart_mb']:.1f}"
                    f" MB; at most {row['most_running']} ran at once",
                    flush=True,
                )
    return rows


def _measure(engine: KVBoost, words: Any, what: str, options: argparse.Namespace) -> dict[str, Any]:
    shared = stream(words, options.shared, seed=int(what == "warm"))
    if what == "warm":
        engine.warm(shared)
        engine.flush()
    sampling = Sampling(max_new_tokens=options.new, ignore_eos=True)
    with Peak(engine) as peak:
        tickets = [
            engine.submit(shared + stream(words, options.own, seed=1000 + n), sampling)
            for n in range(options.requests)
        ]
        for ticket in tickets:
            ticket.result()
    bytes_per_token = engine._parts.model.geometry.bytes_per_token  # noqa: SLF001
    own = options.requests * (options.own + options.new)
    least = bytes_per_token * (options.shared + own)
    apart = bytes_per_token * (options.requests * options.shared + own)
    return {
        "requests": options.requests,
        "shared": options.shared,
        "own": options.own,
        "new": options.new,
        "peak_mb": round(peak.size_bytes / 2**20, 2),
        "least_mb": round(least / 2**20, 2),
        "apart_mb": round(apart / 2**20, 2),
        "ratio": round(peak.size_bytes / least, 4),
        "running_at_peak": peak.num_running,
        "most_running": peak.most_running,
        "goal": GOAL,
    }
