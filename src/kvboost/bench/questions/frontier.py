"""How much of moved text must be computed again, and what does that cost?"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvboost.bench.clock import now
from kvboost.bench.questions.subjects import Row, Subject, layouts, round_ms, shuffled
from kvboost.build import Parts, build_repair
from kvboost.core import MatchKind
from kvboost.engine.prefill import Prefilled, Terms, complete, prefill
from kvboost.engine.verify import compare
from kvboost.models.hf import HFModel
from kvboost.models.rows import Rows
from kvboost.policy.cost import CostModel

NUM_ANSWER = 16
PROMPTS_PER_ROUND = 2  # distances of distributions need more prompts than times do


@dataclass(frozen=True)
class Case:
    """A way of repair: its name in the results, the strategy and its share."""

    repair: str
    strategy: str
    ratio: float = 0.0


CASES = (
    Case("none", "none"),
    Case("heads", "selective"),
    *(Case(str(ratio), "sampled", ratio) for ratio in (0.05, 0.15, 0.3, 0.5, 1.0)),
)
QUICK_CASES = (CASES[0], CASES[3], CASES[-1])


def frontier(subject: Subject) -> Iterator[Row]:
    """A row for each way of repair, on documents that were read in another order."""
    cases = QUICK_CASES if subject.is_quick else CASES
    full_ms: list[float] = []
    seen: dict[Case, list[Row]] = {case: [] for case in cases}
    per_round = 1 if subject.is_quick else PROMPTS_PER_ROUND
    for seed in subject.seeds:
        for number in range(per_round):
            own_seed = 100 * seed + number
            first, moved = layouts(subject.words(own_seed), subject.num_tokens)
            session = subject.session(reuse="auto")
            session.ask(first)
            _, answer, fresh = reference(moved, session.parts)
            for way in shuffled([None, *cases], own_seed):
                if way is None:
                    full_ms.append(reference(moved, session.parts, num_new=1)[0])
                else:
                    parts = repaired(session.parts, way.strategy, way.ratio)
                    seen[way].append(_measure(moved, answer, fresh, parts, way))
    for case, measured in seen.items():
        yield {"repair": case.repair, "tokens": subject.num_tokens, **_row(measured, full_ms)}


def repaired(parts: Parts, strategy: str, ratio: float, **options: Any) -> Parts:
    """The same store under another repair; a cost model that knows nothing drops nothing."""
    chosen: dict[str, Any] = {"recompute_strategy": strategy, "recompute_ratio": ratio, **options}
    given = replace(parts.options, **chosen)
    repairs = {ratio: build_repair(given, ratio)}
    return replace(parts, options=given, repairs=repairs, cost=CostModel())


def timed_prefill(
    tokens: list[int], parts: Parts, terms: Terms, num_new: int = NUM_ANSWER
) -> tuple[float, Prefilled, torch.Tensor]:
    """Milliseconds until the first logits were there, the rows, and these logits."""
    device = parts.model.model.device
    started = now(device)
    prefilled = prefill(tokens, parts, terms, capacity=len(tokens) + num_new)
    logits = complete(prefilled, tokens, parts)
    return 1e3 * (now(device) - started), prefilled, logits


def reference(
    tokens: list[int], parts: Parts, num_new: int = NUM_ANSWER, ends: Collection[int] = ()
) -> tuple[float, list[int], torch.Tensor]:
    """Milliseconds of a full prefill, the greedy answer on it, and the logits of that."""
    full_ms, prefilled, first = timed_prefill(tokens, parts, Terms("off"), num_new)
    answer, logits = greedy(prefilled.rows, first, parts.model, num_new, ends)
    prefilled.rows.release()
    return full_ms, answer, logits


def greedy(
    rows: Rows, logits: torch.Tensor, model: HFModel, num_new: int, ends: Collection[int] = ()
) -> tuple[list[int], torch.Tensor]:
    """The answer from the logits of a prompt on, until `ends` or a number of tokens; its logits."""
    said, seen = [int(logits[-1].argmax())], [logits]
    while len(said) < num_new and said[-1] not in ends:
        step = range(rows.length, rows.length + 1)
        seen.append(model.forward(rows, said[-1:], step))
        said.append(int(seen[-1][-1].argmax()))
    return said, torch.cat(seen).float()


def led_along(answer: list[int], rows: Rows, first: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The logits at each token of an answer that is given, `first` those of its first one."""
    positions = range(rows.length, rows.length + len(answer) - 1)
    if not positions:
        return first.float()
    rest = parts.model.forward(rows, answer[:-1], positions, num_logits=len(positions))
    return torch.cat([first, rest]).float()


def _measure(
    tokens: list[int], answer: list[int], fresh: torch.Tensor, parts: Parts, case: Case
) -> Row:
    """Lead the case along the answer of the full prefill, and compare the distributions."""
    ttft_ms, prefilled, first = timed_prefill(tokens, parts, Terms("auto", "", case.ratio))
    plan, logits = prefilled.plan, led_along(answer, prefilled.rows, first, parts)
    check = compare(fresh, logits, len(tokens), plan.num_reused)
    prefilled.rows.release()
    moved = sum(len(m.span) for m in plan.matches if m.kind is MatchKind.MOVED)
    return {
        "ttft_ms": ttft_ms,
        "kl": check.mean_kl,
        "top1": check.top1_ratio,
        "computed_share": 1 - prefilled.num_cached / len(tokens),
        "moved_share": moved / len(tokens),
    }


def _row(measured: list[Row], full_ms: list[float]) -> Row:
    ratios = [each["ttft_ms"] / full for each, full in zip(measured, full_ms, strict=True)]
    means = {"kl": 5, "top1": 4, "computed_share": 4, "moved_share": 4}  # and their decimals
    return {
        "ttft_ms": round_ms([each["ttft_ms"] for each in measured]),
        "full_ms": round_ms(full_ms),
        "ratio": round(statistics.median(ratios), 4),
        **{n: round(statistics.mean(m[n] for m in measured), d) for n, d in means.items()},
        "prompts": len(measured),
    }
