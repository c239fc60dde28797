"""Logits -> tokens, for many requests at once, each by its own rules and its own dice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost.core import Sampling

MOST_RANKED = 1024  # tokens that are sorted at first: top_p and min_p rarely leave more
LEAST_TEMPERATURE = 1e-5  # below, 32 bits do not tell it from zero

# Of what a grammar or a bias rules out, and of NaN: JSON has neither that nor infinity.
LEAST_LOGPROB = -9999.0


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

    def pick(self, weights: torch.Tensor) -> int:
        """An index, each as often as its weight [count] says; one of weight 0 never."""
        sums = weights.double().cumsum(dim=-1)
        point = torch.rand(1, generator=self._dice, dtype=torch.float64).to(sums.device)
        place = torch.searchsorted(sums, point * sums[-1], right=True)
        return min(int(place), len(sums) - 1)


def choose(logits: Sequence[torch.Tensor], choosers: Sequence[Chooser]) -> list[Choice | Exception]:
    """The next token of each request, from its logits [vocabulary].

    A request whose own rules fail gets the error instead, and the others their tokens.
    """
    rows = torch.stack(list(logits)).float()
    errors = [_adjust(row, chooser) for row, chooser in zip(rows, choosers, strict=True)]
    tokens = rows.max(dim=-1).indices.tolist()  # as argmax, and twice as fast on CPUs
    for place, (row, chooser) in enumerate(zip(rows, choosers, strict=True)):
        if chooser.sampling.temperature > 0 and errors[place] is None:
            tokens[place] = _draw(row, chooser)
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
    logprobs = logits.log_softmax(dim=-1).nan_to_num_(LEAST_LOGPROB).clamp_min_(LEAST_LOGPROB)
    values, places = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(places.tolist(), values.tolist(), strict=True))
    return Choice(token, float(logprobs[token]), top)


def _draw(logits: torch.Tensor, chooser: Chooser) -> int:
    """A token at random: temperature, then top_k, top_p and min_p of the rest.

    Each request is drawn by itself, so that its seed means the same beside others.
    """
    rules = chooser.sampling
    scaled = (logits - logits.max()) / max(rules.temperature, LEAST_TEMPERATURE)
    if rules.top_k or rules.top_p < 1 or rules.min_p:
        return _draw_ranked(scaled, chooser, rules.top_k or MOST_RANKED)
    # All may come, so that no order is needed, which takes far longer than the rest.
    return chooser.pick(scaled.softmax(dim=-1))


def _draw_ranked(scaled: torch.Tensor, chooser: Chooser, most: int) -> int:
    """A token among the likeliest `most`; among all where top_p and min_p leave more than these."""
    rules, size = chooser.sampling, len(scaled)
    count = min(most, size)
    ranked, order = scaled.topk(count) if count <= MOST_RANKED else scaled.sort(descending=True)
    ranked, order = ranked[:count], order[:count]
    whole = ranked if rules.top_k else scaled  # what probabilities are shares of
    probabilities = (ranked - whole.logsumexp(dim=-1)).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    # At 1, nothing is cut off: sums of many small numbers reach it too early.
    most_before = rules.top_p if rules.top_p < 1 else torch.inf
    is_out = (before >= most_before) | (probabilities < probabilities[0] * rules.min_p)
    if not rules.top_k and count < size and not is_out[-1]:
        return _draw_ranked(scaled, chooser, size)
    is_out[0] = False
    probabilities.masked_fill_(is_out, 0.0)
    return int(order[chooser.pick(probabilities)])
