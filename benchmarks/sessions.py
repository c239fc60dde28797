"""Is a session on moved documents exact from its second question on? Promotion in idle time.

Documents are stored by other prompts. A session asks three questions on some of them, in another
order, with idle time in between.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from kvboost import KVBoost
from kvboost.core import MatchKind
from material import DTYPES, model, stream, tokenizer

QUESTIONS = (
    "\n\nQuestion: What is this about?\nAnswer:",
    "\n\nQuestion: Which names does it define?\nAnswer:",
    "\n\nQuestion: Give an example of it.\nAnswer:",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--documents", type=int, default=5, help="in each session")
    parser.add_argument("--tokens", type=int, default=400, help="of a document")
    parser.add_argument("--answer", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--short", type=int, default=20, help="short requests beside promotions")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        settings: Any = {"reuse": "auto", "quality_budget": 100.0}
        with KVBoost(model(name, DTYPES[options.dtype]), words, **settings) as engine:
            about = {"model": name.rstrip("/").split("/")[-1], "dtype": options.dtype}
            rows += [about | row for row in _sessions(engine, words, options)]
            rows.append(about | _beside(engine, words, options))
    return rows


def _sessions(engine: KVBoost, words: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[list[dict[str, Any]]] = [[] for _ in QUESTIONS]
    for session in range(options.sessions):
        context = _stored_documents(engine, words, session, options)
        for turn, question in enumerate(QUESTIONS):
            context = context + words(question, add_special_tokens=False).input_ids
            results = {}
            modes = ("auto", "off") if session % 2 else ("off", "auto")
            for mode in modes:
                results[mode] = engine.generate(context, options.answer, reuse=mode)
            ours, full = results["auto"], results["off"]
            found[turn].append(
                {
                    "ratio": ours.ttft_ms / full.ttft_ms,
                    "ours_ms": ours.ttft_ms,
                    "full_ms": full.ttft_ms,
                    "moved": ours.reuse.tokens(MatchKind.MOVED) / len(context),
                    "exact": ours.reuse.tokens(MatchKind.EXACT) / len(context),
                    "same": ours.token_ids == full.token_ids,
                }
            )
            context = context + list(ours.token_ids)
            engine.flush()
    return [_summary(turn, rows) for turn, rows in enumerate(found)]


def _stored_documents(
    engine: KVBoost, words: Any, session: int, options: argparse.Namespace
) -> list[int]:
    """The documents of a session in its order, stored by a prompt that had them in another."""
    first = 1000 * session
    documents = [stream(words, options.tokens, first + n) for n in range(options.documents)]
    engine.generate([token for each in documents for token in each], 1, reuse="exact")
    random.Random(session).shuffle(documents)
    lead = words(f"Session {session}.\n\n").input_ids
    return lead + [token for each in documents for token in each]


def _summary(turn: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    medians |= {"question": turn + 1, "sessions": len(rows), "same": sum(r["same"] for r in rows)}
    print(
        f"question {turn + 1}: TTFT {medians['ours_ms']:.0f} ms, full prefill"
        f" {medians['full_ms']:.0f} ms ({medians['ratio']:.3f}); {medians['exact']:.0%} exact,"
        f" {medians['moved']:.0%} moved; same output in {medians['same']} of {len(rows)}",
        flush=True,
    )
    return medians


def _beside(engine: KVBoost, words: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Short requests with pauses, while promotions run and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    chance = random.Random(0)
    for number in range(options.short):
        for promotes in (True, False) if number % 2 else (False, True):
            if promotes:
                seed = 10_000 + number
                session = _stored_documents(engine, words, seed, options)
                engine.generate(session, 1, reuse="auto")
            else:
                engine.flush()
            time.sleep(0.5 + chance.random())
            short = stream(words, 128, seed=100_000 + number * 2 + promotes)
            started = time.perf_counter()
            engine.generate(short, 8, reuse="off", min_new_tokens=8)
            times[promotes].append(time.perf_counter() - started)
    p95 = {each: sorted(found)[int(0.95 * (len(found) - 1))] for each, found in times.items()}
    print(
        f"short requests p95: {1e3 * p95[True]:.0f} ms while promotions run,"
        f" {1e3 * p95[False]:.0f} ms without ({p95[True] / p95[False]:.3f})",
        flush=True,
    )
    medians = {each: statistics.median(found) for each, found in times.items()}
    return {
        "question": "short requests",
        "p95_ratio": p95[True] / p95[False],
        "p95_ms": [1e3 * p95[True], 1e3 * p95[False]],
        "p50_ratio": medians[True] / medians[False],
        "samples": options.short,
    }
