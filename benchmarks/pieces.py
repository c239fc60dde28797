"""What does determinism cost? Cold prefill in pieces against prefill in one piece."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

from kvboost import KVBoost
from kvboost.build import Parts
from kvboost.config import Options
from kvboost.engine.prefill import Terms, complete, prefill
from material import DTYPES, model, stream, tokenizer
from measure import ratio, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 1100, 2048, 2500, 4096])
    parser.add_argument("--pieces", type=int, nargs="+", default=[128, 256, 512, 1024])


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        engine = KVBoost(model(name, DTYPES[options.dtype]), words)
        parts = engine._parts  # noqa: SLF001 - the same model with other options
        shapes = {None: parts}
        for size in options.pieces:
            changed = Options(deterministic=True, piece_tokens=size)
            shapes[size] = replace(parts, options=changed)
        for length in options.lengths:
            rows += _measure(name, length, shapes, words, options)
        engine.close()
    return rows


def _prefill(prompt: list[int], parts: Parts) -> None:
    prefilled = prefill(prompt, parts, Terms("off"), capacity=len(prompt))
    complete(prefilled, prompt, parts)
    prefilled.rows.release()


def _measure(
    name: str,
    length: int,
    shapes: dict[int | None, Parts],
    words: Any,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    times = defaultdict(list)
    for turn in range(options.rounds + 1):
        prompt = stream(words, length, seed=turn)
        order = list(shapes) if turn % 2 else list(shapes)[::-1]
        for size in order:
            times[size].append(seconds(partial(_prefill, prompt, shapes[size])))
        if turn == 0:
            times.clear()
    rows = []
    for size in options.pieces:
        figures = ratio(times[size], times[None])
        rows.append(
            {"model": name.rstrip("/").split("/")[-1], "dtype": options.dtype, "tokens": length}
            | {"piece_tokens": size, "pieces_ms": figures["ours_ms"]}
            | {"one_piece_ms": figures["bare_ms"], "ratio": figures["ratio"]}
        )
        print(
            f"{rows[-1]['model']:32} {length:5} tokens, pieces of {size:5}:"
            f" {figures['ours_ms']:9.1f} ms, in one {figures['bare_ms']:9.1f} ms,"
            f" ratio {figures['ratio']:.3f}",
            flush=True,
        )
    return rows
