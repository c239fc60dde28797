"""Scoring: log probabilities of continuations, after one prefill of the prompt."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvboost.engine.results import ReuseReport
from kvboost.engine.texts import check_ids
from kvboost.errors import ConfigError
from kvboost.models.hf import HFModel
from kvboost.models.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.batch.member import Member
    from kvboost.engine.texts import Prompt

STEP_TOKENS = 256  # per forward: the logits of each have the size of the vocabulary


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
    for number, each in enumerate(tokens):
        check_ids(each, num_known, f"continuations[{number}]")
    return tokens


class Scoring:
    """Computes log probabilities on the rows of a prompt; afterwards `scores`."""

    def __init__(self, continuations: Sequence[list[int]]) -> None:
        self._continuations = continuations
        self.scores: list[Score] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max(map(len, self._continuations))

    def steps(self, member: Member) -> Generator[None, None, None]:
        """Score one continuation after the other; stops after each forward."""
        model, rows, tokens = member.parts.model, member.rows, member.request.tokens
        positions, corrected = member.take(len(member.pending))
        rest = [tokens[position] for position in positions]
        first = model.forward(rows, rest, positions, corrected=corrected)
        yield
        for each in self._continuations:
            score = yield from _score(each, first, len(tokens), rows, model)
            self.scores.append(score)
        rows.crop(len(tokens))  # continuations are not stored
        member.output, member.finish_reason = list(self._continuations[0]), "length"


def _score(
    tokens: list[int], first: torch.Tensor, num_before: int, rows: Rows, model: HFModel
) -> Generator[None, None, Score]:
    """Run a continuation after the prompt's rows, over the rows of the one before it.

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
        yield
    return Score(tokens, logprobs, is_greedy)


def _read(logits: torch.Tensor, tokens: list[int]) -> tuple[list[float], bool]:
    """Log probability of each token, and whether all are the most likely ones."""
    wanted = torch.tensor(tokens, device=logits.device)
    logprobs = logits.float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    return logprobs.tolist(), bool((logits.argmax(-1) == wanted).all())
