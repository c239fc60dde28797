"""Can a tenant's cache be felt by another? Time to the first token, with and without a warm prefix.

Of two prefixes one was asked by somebody before. A prober asks both, in random order, and guesses
by the time which it was. The AUC of that guess is 0.5 if time says nothing, and 1 if it says all.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np

from kvboost import KVBoost
from material import DTYPES, model, stream, tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probes", type=int, default=200, help="of each kind")
    parser.add_argument("--tokens", type=int, default=192, help="in a prefix")
    parser.add_argument("--cache-url", help="tiers below memory")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        host = model(name, DTYPES[options.dtype])
        with KVBoost(host, words, cache_url=options.cache_url) as engine:
            for prober in ("victim", "attacker"):
                rows.append(_measure(engine, words, prober, options))
                row = rows[-1] | {"model": name.rstrip("/").split("/")[-1]}
                print(
                    f"{row['who']:14} AUC {row['auc']:.3f} (95 %: {row['low']:.3f}"
                    f"-{row['high']:.3f}), hits {row['hits']} of {2 * options.probes}, median"
                    f" {row['warm_ms']:.1f} ms asked before, {row['cold_ms']:.1f} ms not"
                )
    return rows


def _measure(
    engine: KVBoost, words: Any, prober: str, options: argparse.Namespace
) -> dict[str, Any]:
    chance = random.Random(prober)
    times: dict[bool, list[float]] = {True: [], False: []}
    num_hits = 0
    for probe in range(options.probes):
        texts = {
            is_known: stream(words, options.tokens, seed=chance.randrange(10**9))
            for is_known in (True, False)
        }
        engine.generate(texts[True], 1, tenant="victim")
        engine.flush()
        for is_known in chance.sample([True, False], 2):
            answer = engine.generate(texts[is_known], 1, tenant=prober)
            engine.flush()
            times[is_known].append(answer.ttft_ms)
            num_hits += answer.cached_tokens > 0
        if probe % 50 == 49:
            print(f"  {prober}: {probe + 1} probes", flush=True)
    auc, low, high = _auc(np.array(times[True]), np.array(times[False]))
    return {
        "who": "the same tenant" if prober == "victim" else "another tenant",
        "auc": auc,
        "low": low,
        "high": high,
        "hits": num_hits,
        "warm_ms": float(np.median(times[True])),
        "cold_ms": float(np.median(times[False])),
    }


def _auc(known: np.ndarray, fresh: np.ndarray) -> tuple[float, float, float]:
    """How often a known prefix is faster than a fresh one, with a bootstrap interval."""

    def of(a: np.ndarray, b: np.ndarray) -> float:
        return float(((a[:, None] < b) + 0.5 * (a[:, None] == b)).mean())

    chance = np.random.default_rng(0)
    again = [
        of(chance.choice(known, len(known)), chance.choice(fresh, len(fresh))) for _ in range(500)
    ]
    low, high = np.quantile(again, [0.025, 0.975])
    return of(known, fresh), float(low), float(high)
