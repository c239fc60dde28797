"""Does reuse change an answer? Greedy text cold, warm and by plain generate(), prompt by prompt.

With --deterministic cold and warm must also agree bit by bit, in the logits and in all K/V.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common.material import engine_of, model, stream
from benchmarks.common.measure import Row
from kvboost import KVBoost
from kvboost.core import Span
from kvboost.engine.prefill import Terms, complete, prefill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest prompt")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--piece", type=int, default=512, help="tokens of a deterministic piece")


def run(options: argparse.Namespace) -> Iterator[Row]:
    bare = None if options.deterministic else model(options)
    shapes = {"deterministic": options.deterministic, "piece_tokens": options.piece}
    with engine_of(options, **shapes) as engine:
        for turn in range(options.prompts):
            yield _compare(turn, bare, engine, options)


def _compare(turn: int, bare: Any, engine: KVBoost, options: argparse.Namespace) -> Row:
    chance, words = random.Random(turn), engine.tokenizer
    # Lengths from 50 on, as many short as long by order of magnitude; shares from 0 to 99 %.
    length = int(50 * (options.longest / 50) ** chance.random())
    num_shared = int(length * 0.99 * turn / max(1, options.prompts - 1))
    shared = stream(words, num_shared, seed=2 * turn) if num_shared else []
    engine.warm(shared + stream(words, 40, seed=7))
    prompt = shared + stream(words, length - num_shared, seed=2 * turn + 1)
    cold = engine.generate(prompt, options.new, reuse="off")
    if options.deterministic:
        checks = {"bitwise": _is_bitwise_equal(engine, prompt)}
    else:
        ids = torch.tensor([prompt])
        plain = bare.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new, do_sample=False
        )
        checks = {"cold_is_plain": plain[0, len(prompt) :].tolist() == cold.token_ids}
    warm = engine.generate(prompt, options.new)
    return {
        "tokens": len(prompt),
        "shared": num_shared,
        "reused": warm.cached_tokens,
        "warm_is_cold": warm.token_ids == cold.token_ids,
        **checks,
    }


def _is_bitwise_equal(engine: KVBoost, prompt: list[int]) -> bool:
    parts = engine._parts  # noqa: SLF001 - looks behind the API on purpose
    seen = []
    for reuse in ("off", "exact"):
        prefilled = prefill(prompt, parts, Terms(reuse), capacity=len(prompt))
        logits = complete(prefilled, prompt, parts)
        rows = [plane.clone() for plane in prefilled.rows.read(Span(0, len(prompt)))]
        prefilled.rows.release()
        seen.append([logits, *rows])
    return all(torch.equal(cold, warm) for cold, warm in zip(*seen, strict=True))
