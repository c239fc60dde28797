"""Is reuse="auto" ever slower than "off"? A mixed workload, and predicted against actual times."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.material import engine_of, stream
from benchmarks.common.measure import Row
from kvboost.core import MatchKind

Pair = dict[str, Any]
"""The two results of a request, by mode."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompts")


def run(options: argparse.Namespace) -> Iterator[Row]:
    seen: dict[str, list[Pair]] = defaultdict(list)
    # A generous budget: here time is measured, not quality; see the `quality` benchmark.
    with engine_of(options, reuse="auto", quality_budget=10.0) as engine:
        for number, (kind, tokens) in enumerate(_requests(engine.tokenizer, options)):
            pair: Pair = {}
            for mode in ("auto", "off") if number % 2 else ("off", "auto"):
                pair[mode] = engine.generate(tokens, 1, reuse=mode)
                engine.flush()
            seen[kind].append(pair)
            print(
                f"{kind:14} {len(tokens):5} tokens,"
                f" {pair['auto'].reuse.tokens(MatchKind.MOVED):5} moved,"
                f" off {pair['off'].ttft_ms:8.0f} ms, auto {pair['auto'].ttft_ms:8.0f} ms",
                flush=True,
            )
    everything = [pair for pairs in seen.values() for pair in pairs]
    for kind, pairs in [*seen.items(), ("all", everything)]:
        yield _row(kind, pairs)


def _row(kind: str, pairs: list[Pair]) -> Row:
    auto, off = (np.array([pair[mode].ttft_ms for pair in pairs]) for mode in ("auto", "off"))
    reports = [pair["auto"].reuse for pair in pairs]
    errors = [
        abs(each.predicted_ms - each.actual_ms) / each.actual_ms
        for each in reports
        if each.predicted_ms is not None
    ]
    row: Row = {"kind": kind, "requests": len(pairs)}
    for percent in (50, 95):
        ours, theirs = (float(np.percentile(times, percent)) for times in (auto, off))
        row[f"auto_p{percent}_ms"] = round(ours, 1)
        row[f"off_p{percent}_ms"] = round(theirs, 1)
        row[f"p{percent}_ratio"] = round(ours / theirs, 3)
    row["median_pair_ratio"] = round(float(np.median(auto / off)), 3)
    row["median_prediction_error"] = round(float(np.median(errors)), 3) if errors else None
    return row


def _requests(words: Any, options: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Short prompts, new ones, tiny overlaps and big ones, by turns and without a pattern."""
    chance, longest = random.Random(0), options.longest
    documents = [stream(words, chance.randint(120, 400), seed=50 + i) for i in range(12)]
    yield "new", [t for document in documents[:6] for t in document]
    yield "new", [t for document in documents[6:] for t in document]
    for number in range(options.requests):
        kind = ("short", "new", "tiny overlap", "big overlap")[number % 4]
        if kind == "short":
            yield kind, stream(words, chance.randint(20, 150), seed=1000 + number)
        elif kind == "new":
            yield kind, stream(words, chance.randint(300, longest), seed=2000 + number)
        elif kind == "tiny overlap":
            part = chance.choice(documents)[10 : 10 + chance.randint(40, 110)]
            new = stream(words, chance.randint(300, longest), seed=3000 + number)
            yield kind, new[:50] + part + new[50:]
        else:
            chosen = chance.sample(documents, chance.randint(3, 6))
            question = stream(words, 30, seed=4000 + number)
            yield kind, question[:8] + [t for d in chosen for t in d] + question
