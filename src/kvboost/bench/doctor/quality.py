"""How far an answer on moved text is from the same answer after a full prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvboost.bench.doctor.facts import MovedQuality
from kvboost.bench.doctor.rounds import ask
from kvboost.build import Parts
from kvboost.core import MatchKind
from kvboost.engine.prefill import Terms
from kvboost.engine.texts import PREFACE, tokens_of
from kvboost.engine.verify import PROMPTS, answer_logits, compare
from kvboost.engine.warm import warm_up
from kvboost.policy.cost import CostModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ANSWERED = 16  # tokens of the answer that is compared
NUM_PREFILLS = 5  # that the comparison takes, about, its answer included


def prompts(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Two texts in one order, then in the other with a question."""
    text, question = PROMPTS[0].split("Question:")
    first, second = PREFACE + text, f"{text}{PREFACE}Question:{question}"
    return tokens_of(first, tokenizer), tokens_of(second, tokenizer)


def moved_quality(parts: Parts, tokenizer: PreTrainedTokenizerBase) -> MovedQuality | None:
    """One answer; None where nothing can be moved."""
    first, second = prompts(tokenizer)
    warm_up(first, parts, before=[], tenant="")
    expected = ask(parts, tokenizer, second, "off", NUM_ANSWERED).token_ids
    # A cost model that knows nothing drops nothing: quality counts also where time would not.
    unlearned = replace(parts, cost=CostModel())
    terms = Terms("auto", "", parts.options.recompute_ratio)
    reused, plan = answer_logits(second, expected, unlearned, terms)
    if all(match.kind is not MatchKind.MOVED for match in plan.matches):
        return None
    fresh, _ = answer_logits(second, expected, unlearned, Terms("off"))
    check = compare(fresh, reused, len(second), plan.num_reused)
    return MovedQuality(check.mean_kl, check.top1_ratio)
