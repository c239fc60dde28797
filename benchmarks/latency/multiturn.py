"""Does the wait stay flat? A growing chat, and several questions on one code file."""

from __future__ import annotations

import argparse
import argparse as code_file  # a long module of the standard library, as the file to ask about
import inspect
import statistics
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.common.material import documents, engine_of
from benchmarks.common.measure import Row
from kvboost import GenerationResult, KVBoost

QUESTIONS = (
    "Which class formats the help text, and how?",
    "Where are the values of options converted, and with what?",
    "What happens when a required option is missing here?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--message", type=int, default=100, help="tokens of a user's message")
    parser.add_argument("--answer", type=int, default=60, help="tokens of an answer")
    parser.add_argument("--file", type=int, default=4096, help="tokens of the code file")


def run(options: argparse.Namespace) -> Iterator[Row]:
    with engine_of(options) as engine:
        yield from _chat(engine, options)
        yield from _code(engine, options)


def _chat(engine: KVBoost, options: argparse.Namespace) -> list[Row]:
    results = defaultdict(list)
    for conversation in range(options.rounds):
        text = engine.tokenizer(documents()[conversation], add_special_tokens=False).input_ids
        messages: list[dict[str, str]] = []
        for turn in range(options.turns):
            part = text[turn * options.message : (turn + 1) * options.message]
            messages.append({"role": "user", "content": engine.tokenizer.decode(part)})
            result = engine.chat(messages, options.answer, min_new_tokens=options.answer)
            messages.append({"role": "assistant", "content": result.output_text})
            history = results[turn - 1][-1] if turn else None
            results[turn].append(_figures(result, history))
    return _table("chat turn", results)


def _code(engine: KVBoost, options: argparse.Namespace) -> list[Row]:
    source = engine.tokenizer(inspect.getsource(code_file)).input_ids
    results = defaultdict(list)
    for conversation in range(options.rounds):
        # Another beginning for each round, so that the first question is always cold.
        file = engine.tokenizer(f"# {conversation}\n").input_ids + source[: options.file]
        for turn, question in enumerate(QUESTIONS):
            asked = engine.tokenizer(f"\n\nQuestion: {question}\nAnswer:").input_ids
            result = engine.generate(file + asked, options.answer)
            history = (len(file), 0) if turn else None
            results[turn].append(_figures(result, history))
    return _table("code question", results)


def _figures(result: GenerationResult, history: tuple[int, ...] | None) -> tuple[float, ...]:
    """(tokens known after this turn, ttft, prompt tokens, new tokens, share of history reused)."""
    known = result.prompt_tokens + len(result.token_ids)
    before = history[0] if history else 0
    share = min(1.0, result.cached_tokens / before) if before else 0.0
    return known, result.ttft_ms, result.prompt_tokens, result.prompt_tokens - before, share


def _table(what: str, results: dict[int, list[tuple[float, ...]]]) -> list[Row]:
    rows = []
    for turn, figures in results.items():
        _, ttft, prompt, new, share = (statistics.median(c) for c in zip(*figures, strict=True))
        rows.append(
            {"what": what, "turn": turn + 1, "ttft_ms": round(ttft, 1), "prompt": int(prompt)}
            | {"new": int(new), "history_reused": round(share, 4)}
        )
    print(f"{what}: last / second TTFT {rows[-1]['ttft_ms'] / rows[1]['ttft_ms']:.2f}", flush=True)
    return rows
