"""Is it safe to share? Mixed calls from threads: same answers as alone, memory in its budget."""

from __future__ import annotations

import argparse
import random
import threading
from typing import Any

from kvboost import KVBoost
from material import DTYPES, model, stream, tokenizer
from measure import rss_mb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=50, help="calls of each thread")
    parser.add_argument("--new", type=int, default=8, help="tokens to generate")
    parser.add_argument("--budget", type=int, default=256, help="MiB of the memory tier")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        host = model(name, DTYPES[options.dtype])
        with KVBoost(host, words, max_cache_bytes=options.budget * 2**20) as engine:
            row = _measure(engine, words, options)
        rows.append({"model": name.rstrip("/").split("/")[-1], "dtype": options.dtype} | row)
        print(
            f"{row['calls']} calls from {options.threads} threads: {row['different']} answers"
            f" differ; memory grew by {row['grown_mb']:.0f} MB with a budget of {options.budget}"
            f" MB and buffers of {row['buffers_mb']:.0f} MB; {row['stored_mb']:.0f} MB went"
            f" through the store"
        )
    return rows


def _measure(engine: KVBoost, words: Any, options: argparse.Namespace) -> dict[str, Any]:
    shared = [stream(words, 300, seed=seed) for seed in range(4)]
    chance = random.Random(0)
    prompts = [
        chance.choice(shared)[: chance.randint(0, 300)]
        + stream(words, chance.randint(20, 200), 99 + n)
        for n in range(60)
    ]
    alone = [engine.generate(prompt, options.new, reuse="off").output_text for prompt in prompts]
    before, peak, different = rss_mb(), [rss_mb()], []

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(options.calls):
            number = order.randrange(len(prompts))
            kind = order.choice(["generate", "stream", "batch", "warm", "sample"])
            if kind == "generate":
                text = engine.generate(prompts[number], options.new).output_text
            elif kind == "stream":
                text = "".join(engine.stream(prompts[number], options.new))
            elif kind == "batch":
                text = engine.generate_batch([prompts[number]], options.new)[0].output_text
            else:
                text = alone[number]
                if kind == "warm":
                    engine.warm(stream(words, 300, seed=order.randrange(1000, 9000)))
                else:
                    engine.generate(prompts[number], options.new, do_sample=True)
            if text != alone[number]:
                different.append(number)
            peak.append(rss_mb())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(options.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.flush()
    stats = engine.cache_stats()
    geometry = engine._parts.model.geometry  # noqa: SLF001
    chunk_mb = 128 * geometry.bytes_per_token / 2**20
    return {
        "calls": options.threads * options.calls,
        "different": len(different),
        "budget_mb": options.budget,
        "grown_mb": round(max(peak) - before, 1),
        "buffers_mb": round(2 * 1024 * geometry.bytes_per_token / 2**20, 1),
        "stored_mb": round(stats["stored_chunks"] * chunk_mb, 1),  # short chunks taken as whole
        "evicted_chunks": stats["evicted_chunks"],
    }
