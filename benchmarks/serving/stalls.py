"""Does a long prompt make others wait? Time between tokens of running streams, before and while.

Streams decode; when they have run for a while, a long prompt arrives. Its prefill must not keep
them from their tokens, nor a short prompt that comes after it from its first one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.common.material import engine_of, stream
from benchmarks.common.measure import Row
from kvboost import KVBoost
from kvboost.core import Sampling
from kvboost.engine.results import Delta

GOAL = 2.0
POLL_S = 0.002


class Stream:
    """Notes when each token of an answer came."""

    def __init__(self, engine: KVBoost, prompt: str | list[int], max_new_tokens: int) -> None:
        self.times: list[float] = []
        self.started_at = time.perf_counter()
        sampling = Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)
        self.ticket = engine.submit(prompt, sampling, listener=self._hear)

    def _hear(self, delta: Delta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)

    def wait_for(self, num_tokens: int) -> None:
        while len(self.times) < num_tokens:
            if self.ticket.future.done():
                self.ticket.result()
                raise RuntimeError(f"a stream ended with {len(self.times)} tokens")
            time.sleep(POLL_S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each stream's prompt")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--quiet", type=int, default=48, help="tokens a stream, undisturbed")
    parser.add_argument("--new", type=int, default=2048, help="tokens a stream, at most")
    parser.add_argument(
        "--target", type=int, nargs="+", help="inter_token_target_ms, one after the other"
    )


def run(options: argparse.Namespace) -> Iterator[Row]:
    for target in options.target or [None]:
        settings = {"max_batch_size": options.streams + 1, "inter_token_target_ms": target}
        with engine_of(options, **settings) as engine:
            rounds = [_measure(engine, turn, options) for turn in range(options.rounds + 1)]
        row = {"streams": options.streams, "long": options.long, "goal": GOAL, "target": target}
        yield row | _summary(rounds[1:])  # the first one warmed up


def _measure(engine: KVBoost, turn: int, options: argparse.Namespace) -> dict[str, float]:
    words = engine.tokenizer
    alone = _first_token_s(engine, stream(words, options.long, seed=9000 + turn))
    short_alone = _first_token_s(engine, stream(words, options.prompt, seed=8000 + turn))
    long = Stream(engine, stream(words, options.long, seed=7000 + turn), 1)
    short_behind = _first_token_s(engine, stream(words, options.prompt, seed=6000 + turn))
    long.ticket.result()
    streams = [
        Stream(engine, stream(words, options.prompt, seed=100 * turn + n), options.new)
        for n in range(options.streams)
    ]
    for each in streams:
        each.wait_for(1)
    quiet_from = time.perf_counter()
    counts = [len(each.times) for each in streams]
    for each, count in zip(streams, counts, strict=True):
        each.wait_for(count + options.quiet)
    arrived = time.perf_counter()
    long_ttft = _first_token_s(engine, stream(words, options.long, seed=5000 + turn))
    over = time.perf_counter()
    counts = [len(each.times) for each in streams]
    for each, count in zip(streams, counts, strict=True):
        each.wait_for(count + 1)
        each.ticket.cancel()
    engine.flush()
    quiet = gaps([[at for at in each.times if at <= arrived] for each in streams], quiet_from)
    busy = gaps([each.times for each in streams], arrived, over)
    result = {
        f"{when}_p{percent}_ms": 1e3 * float(np.percentile(times, percent))
        for when, times in (("quiet", quiet), ("busy", busy))
        for percent in (50, 95)
    } | {
        "busy_tokens": len(busy),
        "long_ttft_ms": 1e3 * long_ttft,
        "alone_ttft_ms": 1e3 * alone,
        "short_alone_ttft_ms": 1e3 * short_alone,
        "short_behind_ttft_ms": 1e3 * short_behind,
    }
    print("  " + ", ".join(f"{key} {value:.0f}" for key, value in result.items()), flush=True)
    return result


def _first_token_s(engine: KVBoost, prompt: list[int]) -> float:
    one = Stream(engine, prompt, 1)
    one.ticket.result()
    return one.times[0] - one.started_at


def gaps(streams: Sequence[Sequence[float]], start: float, stop: float = math.inf) -> list[float]:
    """Times between neighbouring tokens, of those that reach into [start, stop)."""
    return [
        after - before
        for times in streams
        for before, after in itertools.pairwise(times)
        if before < stop and after > start
    ]


def _summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds; ratios within a round, where both sides saw the same machine."""
    row = {key: round(statistics.median(each[key] for each in rounds), 1) for key in rounds[0]}
    ratios = [each["long_ttft_ms"] / each["alone_ttft_ms"] for each in rounds]
    row["long_ratio"] = round(statistics.median(ratios), 3)
    for name in ("p50", "p95"):
        ratios = [each[f"busy_{name}_ms"] / each[f"quiet_{name}_ms"] for each in rounds]
        row[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        row[f"{name}_ratio_worst"] = round(max(ratios), 3)
    return row
