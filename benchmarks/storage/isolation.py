"""Can a tenant's cache be felt by another? Time to the first token, with and without a warm prefix.

Of two prefixes one was asked by somebody before. A prober asks both, in random order, and guesses
by the time which it was. The AUC of that guess is 0.5 if time says nothing, and 1 if it says all.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median

from benchmarks.common.material import engine_of, stream
from benchmarks.common.measure import Row
from kvboost import KVBoost
from kvboost.probe.statistics import separation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probes", type=int, default=200, help="of each kind")
    parser.add_argument("--tokens", type=int, default=192, help="in a prefix")
    parser.add_argument("--cache-url", help="tiers below memory")


def run(options: argparse.Namespace) -> Iterator[Row]:
    with engine_of(options, cache_url=options.cache_url) as engine:
        for prober in ("victim", "attacker"):
            yield _measure(engine, prober, options)


def _measure(engine: KVBoost, prober: str, options: argparse.Namespace) -> Row:
    chance, words = random.Random(prober), engine.tokenizer
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
    return {
        "who": "the same tenant" if prober == "victim" else "another tenant",
        **asdict(separation(times[True], times[False])),
        "hits": num_hits,
        "warm_ms": median(times[True]),
        "cold_ms": median(times[False]),
    }
