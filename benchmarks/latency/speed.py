"""Is it ever slower? Ours against bare Transformers: warm, cold, with its store, and per token."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common.material import engine_of, model, stream
from benchmarks.common.measure import Row, median_ms, median_ratio, seconds
from kvboost import KVBoost
from kvboost.bench.questions.subjects import TokenClock

GOALS = {"warm": 1.05, "cold": 1.02, "total": 1.02, "decode": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--live", type=int, default=32, help="new tokens of a warm prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")


def run(options: argparse.Namespace) -> Iterator[Row]:
    bare = model(options)
    with engine_of(options) as engine:
        for length in options.lengths:
            yield from _measure(length, bare, engine, options)


@torch.no_grad()
def _measure(length: int, bare: Any, engine: KVBoost, options: argparse.Namespace) -> list[Row]:
    ours, theirs = defaultdict(list), defaultdict(list)
    words = engine.tokenizer
    prefix = stream(words, length, seed=0)
    engine.warm(prefix)
    in_place = DynamicCache(config=bare.config)
    bare(input_ids=torch.tensor([prefix]), past_key_values=in_place, logits_to_keep=1)
    for turn in range(options.rounds + 1):
        live = stream(words, options.live, seed=1000 + turn)
        fresh = stream(words, length, seed=2000 + turn + length)

        def measure_ours(live: list[int] = live, fresh: list[int] = fresh) -> None:
            ours["warm"].append(engine.generate(prefix + live, 1).ttft_ms / 1e3)
            engine.flush()
            results = []
            total = seconds(
                lambda: (
                    results.append(engine.generate(fresh, options.new, min_new_tokens=options.new)),
                    engine.flush(),
                )
            )
            ours["total"].append(total)
            ours["cold"].append(results[0].ttft_ms / 1e3)
            decode = results[0].total_ms - results[0].ttft_ms
            ours["decode"].append(decode / (options.new - 1) / 1e3)

        def measure_bare(live: list[int] = live, fresh: list[int] = fresh) -> None:
            cache = _same_rows(bare, in_place)
            ids = torch.tensor([live])
            theirs["warm"].append(
                seconds(lambda: bare(input_ids=ids, past_key_values=cache, logits_to_keep=1))
            )
            ids, empty = torch.tensor([fresh]), DynamicCache(config=bare.config)
            theirs["cold"].append(
                seconds(lambda: bare(input_ids=ids, past_key_values=empty, logits_to_keep=1))
            )
            clock = TokenClock()
            arguments = {
                "max_new_tokens": options.new,
                "min_new_tokens": options.new,
                "do_sample": False,
                "stopping_criteria": [clock],
                "attention_mask": torch.ones_like(ids),
            }
            theirs["total"].append(seconds(lambda: bare.generate(ids, **arguments)))
            spent = clock.times[-1] - clock.times[0]
            theirs["decode"].append(spent / (options.new - 1))

        for call in (measure_ours, measure_bare) if turn % 2 else (measure_bare, measure_ours):
            call()
        if turn == 0:  # warms up allocators and kernels
            ours.clear()
            theirs.clear()
    return [
        {
            "tokens": length,
            "what": what,
            "ours_ms": median_ms(ours[what]),
            "bare_ms": median_ms(theirs[what]),
            "ratio": median_ratio(ours[what], theirs[what]),
            "goal": goal,
        }
        for what, goal in GOALS.items()
    ]


def _same_rows(bare: Any, source: DynamicCache) -> DynamicCache:
    """A cache that holds the rows of `source` without copying them."""
    cache = DynamicCache(config=bare.config)
    for layer, full in zip(cache.layers, source.layers, strict=True):
        layer.lazy_initialization(full.keys, full.values)
        layer.keys, layer.values = full.keys, full.values
    return cache
