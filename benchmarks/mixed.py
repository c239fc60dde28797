"""Is reuse="auto" ever slower than "off"? A mixed workload, and predicted against actual times."""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from kvboost import KVBoost
from kvboost.core import MatchKind
from material import DTYPES, model, stream, tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompts")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        # A generous budget: here time is measured, not quality; see the `quality` benchmark.
        engine = KVBoost(
            model(name, DTYPES[options.dtype]), words, reuse="auto", quality_budget=10.0
        )
        rows += [{"model": Path(name).name, **row} for row in _measure(engine, words, options)]
        engine.close()
    return rows


def _measure(engine: KVBoost, words: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    seen: dict[str, list[tuple[float, float, float | None, float, int]]] = {}
    requests = list(_requests(words, options))
    for number, (kind, tokens) in enumerate(requests):
        pair = {}
        for mode in ("auto", "off") if number % 2 else ("off", "auto"):
            result = engine.generate(tokens, 1, reuse=mode)
            pair[mode] = result
            engine.flush()
        report = pair["auto"].reuse
        moved = report.tokens(MatchKind.MOVED)
        seen.setdefault(kind, []).append(
            (
                pair["auto"].ttft_ms,
                pair["off"].ttft_ms,
                report.predicted_ms,
                report.actual_ms,
                moved,
            )
        )
        print(
            f"{kind:14} {len(tokens):5} tokens, {moved:5} moved, off {pair['off'].ttft_ms:8.0f} ms,"
            f" auto {pair['auto'].ttft_ms:8.0f} ms",
            flush=True,
        )
    everything = [each for rows in seen.values() for each in rows]
    return [_row(kind, found) for kind, found in [*seen.items(), ("all", everything)]]


def _row(kind: str, found: list[Any]) -> dict[str, Any]:
    auto, off = ([each[i] for each in found] for i in (0, 1))
    errors = [abs(each[2] - each[3]) / each[3] for each in found if each[2] is not None]
    row = {
        "kind": kind,
        "requests": len(found),
        "auto_p50_ms": round(_percentile(auto, 50), 1),
        "off_p50_ms": round(_percentile(off, 50), 1),
        "auto_p95_ms": round(_percentile(auto, 95), 1),
        "off_p95_ms": round(_percentile(off, 95), 1),
        "p50_ratio": round(_percentile(auto, 50) / _percentile(off, 50), 3),
        "p95_ratio": round(_percentile(auto, 95) / _percentile(off, 95), 3),
        "median_pair_ratio": round(
            statistics.median(a / b for a, b in zip(auto, off, strict=True)), 3
        ),
        "median_prediction_error": round(statistics.median(errors), 3) if errors else None,
    }
    print(row, flush=True)
    return row


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def _requests(words: Any, options: argparse.Namespace) -> Any:
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
