"""Is a session on moved documents exact from its second question on? Promotion in idle time.

Documents are stored by other prompts. A session asks three questions on some of them, in another
order, with idle time in between.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.material import engine_of, stream
from benchmarks.common.measure import Row, turns
from kvboost import KVBoost
from kvboost.bench.clock import seconds
from kvboost.core import MatchKind

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


def run(options: argparse.Namespace) -> Iterator[Row]:
    with engine_of(options, reuse="auto", quality_budget=100.0) as engine:
        yield from _sessions(engine, engine.tokenizer, options)
        yield _beside(engine, engine.tokenizer, options)


def _sessions(engine: KVBoost, words: Any, options: argparse.Namespace) -> list[Row]:
    found: list[list[Row]] = [[] for _ in QUESTIONS]
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


def _summary(turn: int, rows: list[Row]) -> Row:
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    same = sum(row["same"] for row in rows)
    return medians | {"question": turn + 1, "sessions": len(rows), "same": same}


def _beside(engine: KVBoost, words: Any, options: argparse.Namespace) -> Row:
    """Short requests with pauses, while promotions run and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    chance = random.Random(0)
    for number, promotes in turns((True, False), options.short):
        if promotes:
            session = _stored_documents(engine, words, 10_000 + number, options)
            engine.generate(session, 1, reuse="auto")
        else:
            engine.flush()
        time.sleep(0.5 + chance.random())
        short = stream(words, 128, seed=100_000 + number * 2 + promotes)
        times[promotes].append(
            seconds(lambda: engine.generate(short, 8, reuse="off", min_new_tokens=8))  # noqa: B023
        )
    (p50, p95), (usual_p50, usual_p95) = (
        1e3 * np.percentile(times[promotes], [50, 95]) for promotes in (True, False)
    )
    return {
        "question": "short requests",
        "p95_ratio": p95 / usual_p95,
        "p95_ms": [p95, usual_p95],
        "p50_ratio": p50 / usual_p50,
        "samples": options.short,
    }
