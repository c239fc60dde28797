"""What does prompt lookup gain when code is edited, on reused K/V and without?"""

from __future__ import annotations

import argparse
import inspect
import statistics
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common.material import engine_of
from benchmarks.common.measure import Row, median_ratio, turns
from kvboost import KVBoost

EDITS = (
    (textwrap.dedent, "Rename the parameter `text` to `source`."),
    (textwrap.indent, "Rename the parameter `prefix` to `margin`."),
    (textwrap.shorten, "Rename the parameter `width` to `limit`."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--lookup", type=int, default=10, help="tokens that are looked up at once")


def run(options: argparse.Namespace) -> Iterator[Row]:
    with engine_of(options) as engine:
        for function, edit in EDITS:
            prompt = _prompt(engine, function, edit)
            engine.warm(prompt)
            for state in ("warm", "cold"):
                row = {"lookup": options.lookup, "edit": function.__name__}
                yield row | _measure(engine, prompt, state, options)


def _prompt(engine: KVBoost, function: Any, edit: str) -> list[int]:
    request = f"```python\n{inspect.getsource(function)}```\n{edit} Reply with the code only."
    messages = [{"role": "user", "content": request}]
    text = engine.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    tokens: list[int] = engine.tokenizer(text, add_special_tokens=False).input_ids
    return tokens


def _measure(engine: KVBoost, prompt: list[int], state: str, options: argparse.Namespace) -> Row:
    reuse = {"warm": "exact", "cold": "off"}[state]
    speeds: dict[bool, list[float]] = {False: [], True: []}
    texts, cached, num_forwards = {}, set(), 0
    for _, is_lookup in turns((True, False), options.rounds):
        lookup = {"prompt_lookup_num_tokens": options.lookup} if is_lookup else {}
        with counted(engine) as forwards:
            result = engine.generate(
                prompt, options.new, reuse=reuse, repetition_penalty=1.0, **lookup
            )
        engine.flush()
        speeds[is_lookup].append(1e3 * len(result.token_ids) / result.total_ms)
        texts[is_lookup] = result.token_ids
        cached.add(result.cached_tokens)
        num_forwards = len(forwards) if is_lookup else num_forwards
    return {
        "state": state,
        "prompt": len(prompt),
        "cached": max(cached),
        "new": len(texts[True]),
        "plain_tokens_per_s": round(statistics.median(speeds[False]), 2),
        "lookup_tokens_per_s": round(statistics.median(speeds[True]), 2),
        "ratio": median_ratio(speeds[True], speeds[False]),
        "tokens_per_forward": round(len(texts[True]) / num_forwards, 2),
        "is_same_text": texts[False] == texts[True],
    }


@contextmanager
def counted(engine: KVBoost) -> Iterator[list[int]]:
    """How many tokens each forward computes."""
    sizes: list[int] = []
    embeddings = engine._parts.model.model.get_input_embeddings()  # noqa: SLF001
    hook = embeddings.register_forward_hook(
        lambda module, args, output: sizes.append(output.shape[1])
    )
    try:
        yield sizes
    finally:
        hook.remove()
