"""Does K/V stay where it was computed? Exact hits, and streams while a long prompt is stored.

A tall model has the K/V of an 8B model (128 KB a token in fp32) and few weights, so that bytes
are real and computing is cheap.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvboost import KVBoost
from kvboost.models.pool import BlockPool
from material import DTYPES, NoWords, model, random_tokens, stream, tall, tokenizer
from measure import ratio, seconds
from stalls import Stream

TALL = "tall"
GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--live", type=int, default=32, help="new tokens of a warm prompt")
    parser.add_argument("--streams", type=int, default=0, help="measure so many streams, too")
    parser.add_argument("--quiet", type=int, default=48, help="tokens a stream, undisturbed")
    parser.add_argument("--cache-gib", type=float, default=6.0)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = None if name == TALL else tokenizer(name)
        host = tall() if words is None else model(name, DTYPES[options.dtype])
        with tempfile.TemporaryDirectory() as folder:
            tiers: Any = {"disk_cache_dir": folder} if options.streams else {}
            tiers["max_cache_bytes"] = int(options.cache_gib * GIB)
            with KVBoost(copy.deepcopy(host), words or NoWords(), **tiers) as engine:
                for length in options.lengths:
                    rows.append(_hits(engine, host, words, length, options))
                    print(rows[-1], flush=True)
                if options.streams:
                    rows += _beside_streams(engine, words, options)
                    for row in rows[-4:]:
                        print(row, flush=True)
    return rows


def _tokens(words: Any, num_tokens: int, seed: int) -> list[int]:
    if words is not None:
        return stream(words, num_tokens, seed=seed)
    return random_tokens(num_tokens, seed)


@contextmanager
def _counted_copies() -> Iterator[list[int]]:
    """Bytes of each copy into rows of the pool."""
    copied: list[int] = []
    write = BlockPool.write

    def count(self: BlockPool, rows: Any, kv: Any) -> None:
        num_rows = sum(stop - start for start, stop in rows)
        copied.append(num_rows * self.geometry.bytes_per_token)
        write(self, rows, kv)

    BlockPool.write = count  # type: ignore[method-assign]
    try:
        yield copied
    finally:
        BlockPool.write = write  # type: ignore[method-assign]


@torch.no_grad()
def _hits(
    engine: KVBoost, host: Any, words: Any, length: int, options: argparse.Namespace
) -> dict[str, Any]:
    prefix = _tokens(words, length, seed=length)
    engine.generate(prefix, 1)
    engine.flush()
    in_place = _filled(host, length)
    ours, bare, copied_bytes = [], [], 0
    for turn in range(options.rounds + 1):
        live = _tokens(words, options.live, seed=10_000 + turn)

        def measure_ours(live: list[int] = live) -> None:
            nonlocal copied_bytes
            with _counted_copies() as copied:
                result = engine.generate(prefix + live, 1)
            assert result.cached_tokens >= length
            ours.append(result.ttft_ms / 1e3)
            copied_bytes += sum(copied)
            engine.flush()

        def measure_bare(live: list[int] = live) -> None:
            ids = torch.tensor([live])
            bare.append(
                seconds(lambda: host(input_ids=ids, past_key_values=in_place, logits_to_keep=1))
            )
            in_place.crop(-options.live)

        for measure in (measure_ours, measure_bare) if turn % 2 else (measure_bare, measure_ours):
            measure()
    return {
        "what": "exact hit",
        "tokens": length,
        **ratio(ours[1:], bare[1:]),
        "copied_bytes": copied_bytes,
    }


def _filled(host: Any, length: int) -> DynamicCache:
    """K/V of so many tokens; that it is of no text makes no forward faster."""
    cache = DynamicCache(config=host.config)
    host(input_ids=torch.tensor([[5]]), past_key_values=cache, logits_to_keep=1)
    for layer in cache.layers:
        shape = (*layer.keys.shape[:2], length, layer.keys.shape[3])
        layer.keys = torch.randn(shape, dtype=layer.keys.dtype)
        layer.values = torch.randn(shape, dtype=layer.values.dtype)
    return cache


def _beside_streams(
    engine: KVBoost, words: Any, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Inter-token latency of streams: alone, beside a long prompt, its storing and its loading."""
    length = max(options.lengths)
    new = _tokens(words, length, seed=77)
    streams = [Stream(engine, _tokens(words, 64, seed=n), 20_000) for n in range(options.streams)]
    marks = {}
    for each in streams:
        each.wait_for(options.quiet)
    marks["alone"] = (streams[0].times[8], time.perf_counter())
    started = time.perf_counter()
    Stream(engine, new, 1).ticket.result()
    answered = time.perf_counter()
    marks["prefill"] = (started, answered)
    engine._parts.store.tiers.flush(120)  # noqa: SLF001 - without waiting for the streams
    time.sleep(1)
    marks["stored"] = (answered, time.perf_counter())
    memory = engine._parts.store.tiers.memory  # noqa: SLF001
    memory.discard(list(memory._chunks))  # noqa: SLF001
    started = time.perf_counter()
    loaded = Stream(engine, [*new, 7], 1).ticket.result()
    time.sleep(0.5)
    marks["loaded"] = (started, time.perf_counter())
    for each in streams:
        each.ticket.cancel()
    gaps = {what: _gaps(streams, *times) for what, times in marks.items()}
    usual = gaps["alone"]
    return [
        {
            "what": what,
            "gaps": len(found),
            "median_ms": 1e3 * float(np.median(found)),
            "p99_ms": 1e3 * float(np.percentile(found, 99)),
            "p99_ratio": float(np.percentile(found, 99) / np.percentile(usual, 99)),
            "longest_steps": float(max(found) / np.median(usual)),
            "seconds": marks[what][1] - marks[what][0],
            **({"cached": loaded.cached_tokens} if what == "loaded" else {}),
        }
        for what, found in gaps.items()
    ]


def _gaps(streams: list[Stream], start: float, stop: float) -> list[float]:
    return [
        later - earlier
        for each in streams
        for earlier, later in zip(each.times, each.times[1:], strict=False)
        if start <= later and earlier <= stop
    ]
