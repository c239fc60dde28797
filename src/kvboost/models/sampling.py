"""Logits -> tokens, for many requests at once, each by its own rules and its own dice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost.core import Sampling


@dataclass(frozen=True)
class Choice:
    """A token, and what it was chosen from where that is wanted."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, the likeliest first


class Chooser:
    """What one answer's next token depends on besides the logits. Used by one thread."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self._counts: Counter[int] = Counter()  # of the answer
        self._seen = dict.fromkeys(prompt) if sampling.repetition_penalty != 1.0 else {}
        self._dice = torch.Generator()
        if sampling.seed is None:
            self._dice.seed()
        else:
            self._dice.manual_seed(sampling.seed)

    def accept(self, token: int) -> None:
        """Go on with a token."""
        self._counts[token] += 1
        if self.sampling.grammar is not None:
            self.sampling.grammar.accept(token)

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply penalties, biases and the grammar to logits [vocabulary], in place."""
        rules = self.sampling
        if rules.repetition_penalty != 1.0:
            places = torch.tensor(list(self._seen | self._counts), device=logits.device)
            old = logits[places]
            factor = rules.repetition_penalty
            logits[places] = torch.where(old < 0, old * factor, old / factor)
        if self._counts and (rules.presence_penalty or rules.frequency_penalty):
            places = torch.tensor(list(self._counts), device=logits.device)
            counts = torch.tensor(list(self._counts.values()), device=logits.device)
            logits[places] -= rules.presence_penalty + rules.frequency_penalty * counts
        if rules.logit_bias:
            places = torch.tensor(list(rules.logit_bias), device=logits.device)
            logits[places] += torch.tensor(list(rules.logit_bias.values()), device=logits.device)
        if rules.grammar is not None:
            rules.grammar.restrict(logits)

    def noise(self, count: int) -> torch.Tensor:
        """Numbers that turn probabilities into a choice: the least of noise / p wins."""
        return torch.empty(count).exponential_(generator=self._dice)


def choose(logits: Sequence[torch.Tensor], choosers: Sequence[Chooser]) -> list[Choice | Exception]:
    """The next token of each request, from its logits [vocabulary].

    A request whose own rules fail gets the error instead, and the others their tokens.
    """
    rows = torch.stack(list(logits)).float()
    errors = [_adjust(row, chooser) for row, chooser in zip(rows, choosers, strict=True)]
    tokens = rows.argmax(dim=-1).tolist()
    dicing = [i for i, chooser in enumerate(choosers) if chooser.sampling.temperature > 0]
    if dicing:
        drawn = _draw(rows[dicing], [choosers[i] for i in dicing])
        for place, token in zip(dicing, drawn, strict=True):
            tokens[place] = token
    return [
        error or _reported(token, row, chooser.sampling.top_logprobs)
        for error, token, row, chooser in zip(errors, tokens, rows, choosers, strict=True)
    ]


def _adjust(logits: torch.Tensor, chooser: Chooser) -> Exception | None:
    try:
        chooser.adjust(logits)
    except Exception as error:
        return error
    return None


def _reported(token: int, logits: torch.Tensor, num_top: int | None) -> Choice:
    if num_top is None:
        return Choice(token)
    logprobs = logits.log_softmax(dim=-1)
    values, places = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(places.tolist(), values.tolist(), strict=True))
    return Choice(token, float(logprobs[token]), top)


def _draw(logits: torch.Tensor, choosers: Sequence[Chooser]) -> list[int]:
    """Tokens at random [rows, vocabulary]: temperature, then top_k, top_p and min_p of the rest."""
    rules = [chooser.sampling for chooser in choosers]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    size = logits.shape[-1]
    kept = [min(rule.top_k or size, size) for rule in rules]
    # The likeliest first; of no more tokens than any request may choose from.
    sorted_logits, order = logits.topk(max(kept), dim=-1)
    scaled = sorted_logits / column([rule.temperature for rule in rules])
    ranks = torch.arange(scaled.shape[-1], device=logits.device)
    scaled.masked_fill_(ranks >= column(kept), -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    least = probabilities[:, :1] * column([rule.min_p for rule in rules])
    # At 1, nothing is cut off: sums of many small numbers reach it too early.
    most = column([rule.top_p if rule.top_p < 1 else torch.inf for rule in rules])
    is_out = (before >= most) | (probabilities < least)
    is_out[:, 0] = False
    probabilities.masked_fill_(is_out, 0.0)
    # Each throws as many dice as it would alone, so that its seed means the same beside others.
    noise = torch.ones(scaled.shape)
    for row, chooser, count in zip(noise, choosers, kept, strict=True):
        row[:count] = chooser.noise(count)
    picked = (probabilities / noise.to(logits.device)).argmax(dim=-1, keepdim=True)
    return order.gather(-1, picked)[:, 0].tolist()
