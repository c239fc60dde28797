"""What share of passages is found again in shuffled RAG prompts? Ours, a fixed grid, a prefix."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.material import tokenizer
from benchmarks.common.measure import Row
from benchmarks.common.tasks import TASKS, Item, items, prompt
from benchmarks.storage.lookup import CHUNK, SPACE, add
from kvboost.core import Span
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive
from kvboost.reuse.lookup import find, find_moved
from kvboost.tiers.index import ChunkIndex


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["pages"])
    parser.add_argument("--data", type=Path, help="folder of the public data sets")
    parser.add_argument("--prompts", type=int, default=60)


def run(options: argparse.Namespace) -> Iterator[Row]:
    words = tokenizer(options.model)
    for task in options.task:
        yield {"task": task, **_measure(task, words, options)}


def _measure(task: str, words: Any, options: argparse.Namespace) -> Row:
    chance = random.Random(0)
    pool = [
        _within(text, words) for item in items(task, 30, options.data, 6) for text in item.documents
    ]
    passages = [text for text in dict.fromkeys(pool) if text]
    index, grid = ChunkIndex(), set()
    chance.shuffle(passages)
    for start in range(0, len(passages), 5):  # each passage is seen once, beside others
        tokens = _tokens(passages[start : start + 5], words)
        add(index, np.array(tokens, "<u4"))
        grid |= {chunk.tokens for chunk in split(tokens, CHUNK)}
    total = ours = on_grid = prefix = prompt_tokens = 0
    for _ in range(options.prompts):
        chosen = chance.sample(passages, chance.randint(4, 8))
        tokens = _tokens(chosen, words)
        chunks = split(tokens, CHUNK)
        exact = find(chunks, derive(chunks, SPACE), index)
        plan = find_moved(exact, chunks, index, SPACE)
        found = {p for m in plan.matches for p in range(m.span.start, m.span.stop)}
        same = {p for c in chunks if c.tokens in grid for p in range(c.span.start, c.span.stop)}
        inside = {p for span in _spans(chosen, tokens, words) for p in range(span.start, span.stop)}
        total += len(inside)
        ours += len(inside & found)
        on_grid += len(inside & same)
        prefix += len(inside & set(range(exact.num_reused)))
        prompt_tokens += len(tokens)
    return {
        "prompts": options.prompts,
        "mean_prompt_tokens": round(prompt_tokens / options.prompts),
        "found": round(ours / total, 4),
        "fixed_grid": round(on_grid / total, 4),
        "prefix_only": round(prefix / total, 4),
    }


def _within(text: str, words: Any, low: int = 100, high: int = 400) -> str:
    """A passage of 100 to 400 tokens, or nothing."""
    encoded = words(text, add_special_tokens=False, return_offsets_mapping=True)
    if len(encoded.input_ids) < low:
        return ""
    last = min(len(encoded.input_ids), high) - 1
    return text[: encoded.offset_mapping[last][1]]


def _tokens(passages: list[str], words: Any) -> list[int]:
    text = prompt(Item(passages, "What do they have in common?", []), words)
    return list(words(text, add_special_tokens=False).input_ids)


def _spans(passages: list[str], tokens: list[int], words: Any) -> list[Span]:
    """Where the passages stand, by characters: tokens may join letters of both sides."""
    text = prompt(Item(passages, "What do they have in common?", []), words)
    offsets = words(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    spans, cursor = [], 0
    for passage in passages:
        start = text.index(passage, cursor)
        cursor = start + len(passage)
        inside = [i for i, (a, b) in enumerate(offsets) if a >= start and b <= cursor]
        spans.append(Span(inside[0], inside[-1] + 1))
    return spans
