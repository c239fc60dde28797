"""Reuse against full prefill on the same prompts: distance of the logits, first differing token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.build import Parts
from kvboost.core import ReuseMode
from kvboost.engine.prefill import prefill
from kvboost.engine.results import CorrectnessReport, PromptCheck

# Worst KL per answer token. fp32 differs by the order of summation alone; in 16-bit dtypes the
# same prompt computed in other shapes already differs by up to 0.02 (docs/research-log.md).
TOLERANCE_KL = {"float32": 1e-6, "float64": 1e-12, "float16": 0.05, "bfloat16": 0.05}

PROMPTS = (
    "A library keeps one card for each book. The card names the author, the title, the year and "
    "the shelf. When a book is lent, the librarian moves its card to a second drawer and writes "
    "the reader's number on a slip. Every evening the slips are sorted by the date on which the "
    "books are due, and a letter goes to each reader who is late. In winter the drawer of lent "
    "books is always the fuller one, for the evenings are long. A child once asked why the cards "
    "are not simply thrown away when a book is lost. The librarian answered that a card without "
    "a book is still a promise, and that promises are kept in a third drawer, which is small.\n\n"
    "Question: How many drawers are there, and what is in each of them?\nAnswer:",
    "def moving_average(values, width):\n"
    '    """Average of the last `width` values at each place, fewer at the start."""\n'
    "    total, window, averages = 0.0, [], []\n"
    "    for value in values:\n"
    "        window.append(value)\n"
    "        total += value\n"
    "        if len(window) > width:\n"
    "            total -= window.pop(0)\n"
    "        averages.append(total / len(window))\n"
    "    return averages\n\n\n"
    "def test_moving_average():\n"
    "    assert moving_average([1, 2, 3, 4], 2) == [1.0, 1.5, 2.5, 3.5]\n"
    "    assert moving_average([], 3) == []\n"
    "    assert moving_average([5], 3) == [5.0]\n\n\n"
    "def moving_maximum(values, width):\n",
)


def verify(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], parts: Parts
) -> CorrectnessReport:
    """Compare, for prompts that are in the store, the logits of their answers with and without it.

    `answers` are the greedy answers without reuse; both runs are forced along them, so that one
    early difference does not hide what comes after it.
    """
    checks = []
    for tokens, expected in zip(prompts, answers, strict=True):
        fresh, _ = _answer_logits(tokens, expected, parts, reuse="off")
        reused, num_cached = _answer_logits(tokens, expected, parts, reuse="exact")
        checks.append(_compare(fresh, reused, len(tokens), num_cached))
    dtype = parts.model.geometry.dtype
    is_bitwise = parts.options.deterministic
    return CorrectnessReport(
        checks=tuple(checks),
        tolerance_kl=0.0 if is_bitwise else TOLERANCE_KL[dtype],
        must_agree=is_bitwise or dtype in ("float32", "float64"),
    )


def _answer_logits(
    tokens: list[int], expected: list[int], parts: Parts, reuse: ReuseMode
) -> tuple[torch.Tensor, int]:
    """Logits from which each token of `expected` was chosen, and the prompt tokens reused."""
    capacity = len(tokens) + len(expected)
    prefilled = prefill(tokens, parts, reuse=reuse, tenant="", capacity=capacity)
    stop = capacity - 1
    positions = range(prefilled.pending[0], stop)
    rest = (tokens + expected)[positions.start : stop]
    logits = parts.model.forward(prefilled.slots, rest, positions, num_logits=len(expected))
    parts.model.recycle(prefilled.slots)
    return logits.float(), prefilled.plan.num_reused


def _compare(
    fresh: torch.Tensor, reused: torch.Tensor, num_tokens: int, num_cached: int
) -> PromptCheck:
    p, q = fresh.log_softmax(-1), reused.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    same = fresh.argmax(-1) == reused.argmax(-1)
    differing = (~same).nonzero()
    return PromptCheck(
        prompt_tokens=num_tokens,
        cached_tokens=num_cached,
        max_kl=float(kl.max()),
        top1_ratio=float(same.float().mean()),
        first_difference=int(differing[0]) if len(differing) else None,
    )
