"""Does memory stay in its budget? An engine that computes many times the K/V that it may hold.

The tall model has 128 KB of K/V per token. Callers send new prompts, repeat old ones and move
parts of them; every output on moved text is audited.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.common.material import NoWords, random_tokens, tall
from benchmarks.common.measure import Peak, Row, memory_mb
from kvboost import KVBoost
from kvboost.config import MIB

MOST_OVER = 1.05  # of the budget,
MOST_MORE_MB = 200  # and so much more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--budget", type=int, default=1024, help="MiB of K/V")
    parser.add_argument("--times", type=float, default=16, help="K/V computed, in budgets")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--cache-url", help="also with these tiers below memory")


def run(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        below = [None, f"file://{folder}", *([options.cache_url] if options.cache_url else [])]
        for url in below:
            yield _measure(url, options)


def _measure(url: str | None, options: argparse.Namespace) -> Row:
    settings: dict[str, Any] = {"reuse": "auto", "audit_ratio": 1.0, "cache_url": url}
    settings |= {"max_cache_bytes": options.budget * MIB, "max_disk_bytes": 8192 * MIB}
    with KVBoost(tall(), NoWords(), **settings) as engine:
        engine.generate(random_tokens(64, seed=-1), 4)
        own_mb = partial(memory_mb, "RssAnon")  # without the system's file cache
        before = own_mb()
        started = time.perf_counter()
        token_mb = engine._parts.model.geometry.bytes_per_token / MIB  # noqa: SLF001
        num_wanted = options.times * options.budget / token_mb
        counts = {"computed": 0, "reused": 0}
        lock = threading.Lock()

        def work(number: int) -> None:
            chance = random.Random(number)
            seen: list[list[int]] = []
            while counts["computed"] < num_wanted:
                tokens = _prompt(chance, seen, options.longest)
                result = engine.generate(tokens, 16)
                with lock:
                    counts["reused"] += result.cached_tokens
                    counts["computed"] += len(tokens) - result.cached_tokens
                seen.append(tokens)

        with Peak(own_mb) as peak:
            with ThreadPoolExecutor(options.threads) as callers:
                list(callers.map(work, range(options.threads)))
            seconds = time.perf_counter() - started
            engine.flush()
        limit_mb = MOST_OVER * options.budget + MOST_MORE_MB
        grown_mb = round(peak.most - before, 1)
        return {
            "below": "nothing" if url is None else url.split(":")[0],
            "budget_mb": options.budget,
            "grown_mb": grown_mb,
            "limit_mb": limit_mb,
            "violations": [f"{grown_mb} MB more memory"] if grown_mb > limit_mb else [],
            "computed_mb": round(counts["computed"] * token_mb),
            "loaded_mb": round(counts["reused"] * token_mb),
            "audits": engine.cache_stats()["audits"],
            "seconds": round(seconds, 1),
        }


def _prompt(chance: random.Random, seen: list[list[int]], longest: int) -> list[int]:
    """A new prompt, an old one, or parts of two old ones in a new one."""
    new = random_tokens(chance.randrange(64, longest), seed=chance.randrange(1 << 30))
    if len(seen) < 2 or (kind := chance.randrange(3)) == 0:
        return new
    first, second = (chance.choice(seen) for _ in range(2))
    if kind == 1:
        return [*first, *new[:32]]
    return [*new[:32], *first[len(first) // 2 :], *second[: len(second) // 2]][:longest]
