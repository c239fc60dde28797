"""Log probabilities of continuations: the prompt once, with reuse, then each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvboost.build import Parts
from kvboost.engine.answer import terms_of, why_not
from kvboost.engine.audit import carry_out, prepare_audit
from kvboost.engine.prefill import Prefilled, complete, keep, prefill
from kvboost.engine.report import count, report
from kvboost.engine.request import Request
from kvboost.engine.results import ReuseReport
from kvboost.engine.texts import check_ids
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models.hf import HFModel
from kvboost.models.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.texts import Prompt
    from kvboost.engine.worker import Idle, Later

STEP_TOKENS = 256  # whose logits are there at once: a row has the size of the vocabulary


@dataclass(frozen=True)
class Score:
    """Log probabilities of one continuation."""

    token_ids: list[int]  #: its tokens
    logprobs: list[float]  #: natural logarithm of each token's probability
    is_greedy: bool  #: whether greedy decoding generates exactly these tokens

    @property
    def logprob(self) -> float:
        """Log probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class ScoreResult:
    """Scores of continuations, in the order given."""

    scores: list[Score]  #: one per continuation
    prompt_tokens: int  #: length of the prompt
    cached_tokens: int  #: prompt tokens that were not computed
    reuse: ReuseReport  #: what was reused, span by span
    total_ms: float  #: time of the whole call


def continuation_tokens(
    continuations: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, num_known: int
) -> list[list[int]]:
    """Token ids of continuations, without a tokenizer's BOS.

    Raises:
        ConfigError: there is none, one is empty, or has ids from `num_known` on.
    """
    if isinstance(continuations, str):
        raise ConfigError("continuations is one text: expected a list of texts")
    tokens = [
        tokenizer(each, add_special_tokens=False).input_ids if isinstance(each, str) else list(each)
        for each in continuations
    ]
    if not tokens or not all(tokens):
        raise ConfigError("nothing to score: no continuations, or one is empty")
    for place, each in enumerate(tokens):
        check_ids(each, num_known, f"continuations[{place}]")
    return tokens


def score(
    request: Request, continuations: Sequence[list[int]], parts: Parts
) -> tuple[ScoreResult, Later]:
    """Score continuations of a prompt, and return with it the work of storing the prompt's K/V.

    Raises:
        UnsupportedModel: the model runs without our cache.
    """
    parts, tokens = parts.under(request.adapter), request.tokens
    model = parts.model
    if model.refusal:
        raise UnsupportedModel(model.refusal)
    capacity = len(tokens) + max(map(len, continuations))
    note = why_not(request, model, capacity)
    terms, guard_note = terms_of(request, parts, is_refused=bool(note))
    prefilled = prefill(tokens, parts, terms, capacity=capacity, brought=request.brought)
    first = complete(prefilled, tokens, parts)
    read_at = time.perf_counter()
    result = ScoreResult(
        scores=[_score(each, first, len(tokens), prefilled.rows, model) for each in continuations],
        prompt_tokens=len(tokens),
        cached_tokens=prefilled.num_cached,
        reuse=report(prefilled, len(tokens), parts, note or guard_note, read_at),
        total_ms=1e3 * (time.perf_counter() - request.started_at),
    )
    count(request, prefilled, parts, looked_up=not note)

    def later() -> Idle | None:
        parts.cost.observe(prefilled.work, read_at - prefilled.started_at)
        audit = None
        if not note:
            _store(request, parts, prefilled)
            audit = prepare_audit(request, parts, prefilled, terms, continuations[0])
        prefilled.rows.release()
        return None if audit is None else carry_out(audit, parts)

    return result, later


def _score(
    tokens: list[int], first: torch.Tensor, num_before: int, rows: Rows, model: HFModel
) -> Score:
    """Run a continuation behind the prompt's rows, over those of the one before it.

    `first` are the logits after the prompt; the last token is never run.
    """
    rows.crop(num_before)
    logprobs, is_greedy = _read(first, tokens[:1])
    for start in range(0, len(tokens) - 1, STEP_TOKENS):
        stop = min(start + STEP_TOKENS, len(tokens) - 1)
        positions = range(num_before + start, num_before + stop)
        logits = model.forward(rows, tokens[start:stop], positions, num_logits=stop - start)
        more, are_best = _read(logits, tokens[start + 1 : stop + 1])
        logprobs, is_greedy = logprobs + more, is_greedy and are_best
    return Score(tokens, logprobs, is_greedy)


def _read(logits: torch.Tensor, tokens: list[int]) -> tuple[list[float], bool]:
    """Log-probability of each token by its row of logits, and whether all are the likeliest."""
    wanted = torch.tensor(tokens, device=logits.device)
    logprobs = logits.float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    return logprobs.tolist(), bool((logits.argmax(-1) == wanted).all())


def _store(request: Request, parts: Parts, prefilled: Prefilled) -> None:
    """Keep the prompt's K/V, in whole pieces where these have a fixed shape."""
    size = parts.piece_tokens or 1
    whole = request.tokens[: len(request.tokens) // size * size]
    if whole:
        keep(prefilled, whole, parts, tenant=request.tenant)
