"""Verification: outputs with reuse compared with a full prefill, by logits and tokens."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvboost.build import Parts
from kvboost.config import EXACT_BITS
from kvboost.core import MatchKind, ReusePlan
from kvboost.engine.prefill import Terms, prefill
from kvboost.engine.results import CorrectnessReport, PromptCheck
from kvboost.engine.texts import tokens_of
from kvboost.engine.warm import warm_up
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.texts import Prompt

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


def prompts_to_verify(
    prompts: Sequence[Prompt] | None, tokenizer: PreTrainedTokenizerBase, parts: Parts
) -> list[list[int]]:
    """Tokens of the caller's prompts, or of built-in ones."""
    if isinstance(prompts, str):
        raise ConfigError("prompts is one text: expected a list of texts")
    if prompts is not None:
        return [tokens_of(prompt, tokenizer) for prompt in prompts]
    # Long enough that whole pieces of deterministic prefill are reused.
    tokens = [tokens_of(prompt, tokenizer) for prompt in PROMPTS]
    return [each * (1 + (parts.piece_tokens or 0) // len(each)) for each in tokens]


def verify(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], parts: Parts
) -> CorrectnessReport:
    """Store each prompt, then compare the logits of its answer with and without the store.

    `answers` are the greedy answers without reuse; both runs are forced along them, so that one
    early difference does not hide what comes after it.
    """
    checks = []
    for tokens, expected in zip(prompts, answers, strict=True):
        warm_up(tokens, parts, before=[], tenant="")
        fresh, _ = answer_logits(tokens, expected, parts, Terms("off"))
        reused, plan = answer_logits(tokens, expected, parts, Terms("exact"))
        checks.append(compare(fresh, reused, len(tokens), plan.num_reused))
    if parts.options.kv_cache_bits < EXACT_BITS:
        return _within_budget(checks, parts)
    dtype = parts.model.geometry.dtype
    is_bitwise = parts.options.deterministic
    return CorrectnessReport(
        checks=tuple(checks),
        tolerance_kl=0.0 if is_bitwise else TOLERANCE_KL[dtype],
        must_agree=is_bitwise or dtype in ("float32", "float64"),
    )


def verify_moved(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], parts: Parts
) -> CorrectnessReport:
    """Compare each answer on K/V stored by the prompts before it with a full prefill's.

    Prompts that take nothing moved from earlier ones are left out of the report.
    """
    checks, tenant = [], f"verify_correctness {uuid.uuid4()}"
    for tokens, expected in zip(prompts, answers, strict=True):
        terms = Terms("auto", tenant, parts.options.recompute_ratio)
        reused, plan = answer_logits(tokens, expected, parts, terms)
        if any(match.kind is MatchKind.MOVED for match in plan.matches):
            fresh, _ = answer_logits(tokens, expected, parts, Terms("off"))
            checks.append(compare(fresh, reused, len(tokens), plan.num_reused))
        warm_up(tokens, parts, before=[], tenant=tenant)
    return _within_budget(checks, parts)


def _within_budget(checks: Sequence[PromptCheck], parts: Parts) -> CorrectnessReport:
    budget = parts.options.quality_budget
    return CorrectnessReport(tuple(checks), budget, must_agree=False, of_mean=True)


def answer_logits(
    tokens: list[int], expected: list[int], parts: Parts, terms: Terms
) -> tuple[torch.Tensor, ReusePlan]:
    """Logits from which each token of `expected` was chosen, and what of the prompt was reused."""
    stop = len(tokens) + len(expected) - 1
    prefilled = prefill(tokens, parts, terms, capacity=stop + 1)
    pending = prefilled.pending
    if isinstance(pending, range):
        positions: Sequence[int] = range(pending.start, stop)
    else:
        positions = [*pending, *range(len(tokens), stop)]
    everything = tokens + expected
    rest = [everything[position] for position in positions]
    logits = parts.model.forward(
        prefilled.rows,
        rest,
        positions,
        num_logits=len(expected),
        corrected=prefilled.corrected,
    )
    prefilled.rows.release()
    return logits.float(), prefilled.plan


def compare(
    fresh: torch.Tensor, reused: torch.Tensor, num_tokens: int, num_cached: int
) -> PromptCheck:
    """The distance between an answer's logits with and without reuse."""
    p, q = fresh.log_softmax(-1), reused.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    same = fresh.argmax(-1) == reused.argmax(-1)
    differing = (~same).nonzero()
    return PromptCheck(
        prompt_tokens=num_tokens,
        cached_tokens=num_cached,
        max_kl=float(kl.max()),
        mean_kl=float(kl.mean()),
        top1_ratio=float(same.float().mean()),
        first_difference=int(differing[0]) if len(differing) else None,
    )
