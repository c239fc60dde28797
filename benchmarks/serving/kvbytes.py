"""Is a shared prefix held once? Bytes of K/V that many running requests occupy together."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.common.material import engine_of, stream
from benchmarks.common.measure import Peak, Row
from kvboost import KVBoost
from kvboost.core import Sampling

GOAL = 1.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=2048, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=50, help="tokens of each prompt alone")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")


def run(options: argparse.Namespace) -> Iterator[Row]:
    with engine_of(options, max_batch_size=options.requests) as engine:
        for what in ("cold", "warm"):
            yield {"prefix": what, **_measure(engine, what, options)}


def _measure(engine: KVBoost, what: str, options: argparse.Namespace) -> Row:
    words = engine.tokenizer
    shared = stream(words, options.shared, seed=int(what == "warm"))
    if what == "warm":
        engine.warm(shared)
        engine.flush()
    sampling = Sampling(max_new_tokens=options.new, ignore_eos=True)

    running: list[int] = []

    def occupied() -> tuple[int, int]:
        stats = engine.batch_stats()
        running.append(stats["num_running"])
        return stats["kv_bytes"], running[-1]

    with Peak(occupied, 0.001) as peak:
        tickets = [
            engine.submit(shared + stream(words, options.own, seed=1000 + n), sampling)
            for n in range(options.requests)
        ]
        for ticket in tickets:
            ticket.result()
    bytes_per_token = engine._parts.model.geometry.bytes_per_token  # noqa: SLF001
    own = options.requests * (options.own + options.new)
    least = bytes_per_token * (options.shared + own)
    size_bytes, num_running = peak.most
    apart = bytes_per_token * (options.requests * options.shared + own)
    return {
        "requests": options.requests,
        "shared": options.shared,
        "own": options.own,
        "new": options.new,
        "peak_mb": round(size_bytes / 2**20, 2),
        "least_mb": round(least / 2**20, 2),
        "apart_mb": round(apart / 2**20, 2),
        "ratio": round(size_bytes / least, 4),
        "running_at_peak": num_running,
        "most_running": max(running),
        "goal": GOAL,
    }
