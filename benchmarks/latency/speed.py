"""Is it ever slower? Ours against bare Transformers: warm, cold, with its store, and per token.

`--model tall` has the K/V of an 8B model, 128 KB a token in fp32, and few weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common.material import engine_of, model, stream
from benchmarks.common.measure import Row, by_turns, median_ms, median_ratio
from kvboost import KVBoost
from kvboost.bench.clock import seconds
from kvboost.bench.questions.subjects import TokenClock

GOALS = {"warm": 1.02, "cold": 1.02, "total": 1.02, "decode": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--live", type=int, default=32, help="new tokens of a warm prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")


def run(options: argparse.Namespace) -> Iterator[Row]:
    bare = model(options)
    with engine_of(options, max_cache_bytes="6GiB") as engine:
        for length in options.lengths:
            yield from _measure(length, bare, engine, options)


@torch.no_grad()
def _measure(length: int, bare: Any, engine: KVBoost, options: argparse.Namespace) -> list[Row]:
    words = engine.tokenizer
    prefix = stream(words, length, seed=0)
    engine.warm(prefix)
    engine.flush()
    in_place = DynamicCache(config=bare.config)
    bare(input_ids=torch.tensor([prefix]), past_key_values=in_place, logits_to_keep=1)

    def prompts(number: int) -> tuple[list[int], list[int]]:
        live = stream(words, options.live, seed=1000 + number)
        return live, stream(words, length, seed=2000 + number + length)

    def ours(number: int) -> dict[str, float]:
        live, fresh = prompts(number)
        warm = engine.generate(prefix + live, 1)
        engine.flush()
        started = time.perf_counter()
        cold = engine.generate(fresh, options.new, min_new_tokens=options.new)
        engine.flush()
        return {
            "total": time.perf_counter() - started,
            "warm": warm.ttft_ms / 1e3,
            "cold": cold.ttft_ms / 1e3,
            "decode": (cold.total_ms - cold.ttft_ms) / (options.new - 1) / 1e3,
        }

    def theirs(number: int) -> dict[str, float]:
        live, fresh = prompts(number)
        warm, cold = _same_rows(bare, in_place), DynamicCache(config=bare.config)
        live_ids, ids = torch.tensor([live]), torch.tensor([fresh])
        taken = {
            "warm": seconds(
                lambda: bare(input_ids=live_ids, past_key_values=warm, logits_to_keep=1)
            ),
            "cold": seconds(lambda: bare(input_ids=ids, past_key_values=cold, logits_to_keep=1)),
        }
        clock = TokenClock()
        arguments = {
            "max_new_tokens": options.new,
            "min_new_tokens": options.new,
            "do_sample": False,
            "stopping_criteria": [clock],
            "attention_mask": torch.ones_like(ids),
        }
        taken["total"] = seconds(lambda: bare.generate(ids, **arguments))
        taken["decode"] = (clock.times[-1] - clock.times[0]) / (options.new - 1)
        return taken

    rounds = by_turns({"ours": ours, "bare": theirs}, options.rounds)
    return [_row(length, what, rounds["ours"], rounds["bare"]) for what in GOALS]


def _row(length: int, what: str, *sides: list[dict[str, float]]) -> Row:
    ours, bare = ([taken[what] for taken in side] for side in sides)
    row = {"tokens": length, "what": what, "ours_ms": median_ms(ours), "bare_ms": median_ms(bare)}
    return row | {"ratio": median_ratio(ours, bare), "goal": GOALS[what]}


def _same_rows(bare: Any, source: DynamicCache) -> DynamicCache:
    """A cache that holds the rows of `source` without copying them."""
    cache = DynamicCache(config=bare.config)
    for layer, full in zip(cache.layers, source.layers, strict=True):
        layer.lazy_initialization(full.keys, full.values)
        layer.keys, layer.values = full.keys, full.values
    return cache
