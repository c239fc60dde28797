"""Does K/V stay where it was computed? Exact hits, and streams while a long prompt is stored.

A tall model has the K/V of an 8B model (128 KB a token in fp32) and few weights, so that bytes
are real and computing is cheap.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvboost import KVBoost
from kvboost.models.pool import BlockPool
from material import DTYPES, model, stream, tokenizer
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
        host = _tall() if words is None else model(name, DTYPES[options.dtype])
        with tempfile.TemporaryDirectory() as folder:
            tiers: Any = {"disk_cache_dir": folder} if options.streams else {}
            tiers["max_cache_bytes"] = int(options.cache_gib * GIB)
            with KVBoost(copy.deepcopy(host), words or _NoWords(), **tiers) as engine:
                for length in options.lengths:
                    rows.append(_hits(engine, host, words, length, options))
                    print(rows[-1], flush=True)
                if options.streams:
                    rows += _beside_streams(engine, words, options)
                    for row in rows[-4:]:
                        print(row, flush=True)
    return rows


class _NoWords:
    """A tokenizer for token ids alone."""

    chat_template = None

    def decode(self, tokens: list[int], **_: object) -> str:
        return " ".join(map(str, tokens))

    batch_decode = staticmethod(lambda rows, **_: [" ".join(map(str, row)) for row in rows])


def _tall() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=262144,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def _tokens(words: Any, num_tokens: int, seed: int) -> list[int]:
    if words is not None:
        return stream(words, num_tokens, seed=seed)
    chance = random.Random(seed)
    return [chance.randrange(5, 500) for _ in range(num_tokens)]


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
    in_place = DynamicCache(config=host.config)
    host(input_ids=torch.tensor([prefix]), past_key_values=in_place, logits_to_keep=1)
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
