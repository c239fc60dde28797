"""Logits -> tokens, for many requests at once, each with its own rules and random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvboost.core import Sampling
from kvboost.models.upload import sent, upload

Tokens: TypeAlias = npt.NDArray[np.int64]

MOST_RANKED = 1024  # tokens that are sorted at first: top_p and min_p rarely leave more
LEAST_TEMPERATURE = 1e-5  # below, 32 bits do not tell it from zero

# For tokens ruled out by a grammar or bias, and for NaN: JSON has neither NaN nor infinity.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Choice:
    """A chosen token, with log probabilities if requested."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens, in order


class Chooser:
    """State of one output that its next token depends on. Used by one thread."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self._counts: Counter[int] = Counter()  # of the answer
        self._seen = dict.fromkeys(prompt) if sampling.repetition_penalty != 1.0 else {}
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def accept(self, token: int) -> None:
        """Append a chosen token."""
        self._counts[token] += 1
        if self.sampling.repetition_penalty != 1.0:
            self._seen[token] = None
        if self.sampling.grammar is not None:
            self.sampling.grammar.accept(token)

    def seen(self) -> Tokens:
        """Tokens that the repetition penalty applies to."""
        return np.fromiter(self._seen, np.int64, len(self._seen))

    def offsets(self) -> tuple[Tokens, npt.NDArray[np.float32]]:
        """What the other penalties and biases add to logits, by token; a token may come twice."""
        rules = self.sampling
        added = list(rules.logit_bias.items())
        if rules.presence_penalty or rules.frequency_penalty:
            added += [
                (token, -(rules.presence_penalty + rules.frequency_penalty * count))
                for token, count in self._counts.items()
            ]
        tokens = np.fromiter((token for token, _ in added), np.int64, len(added))
        return tokens, np.fromiter((value for _, value in added), np.float32, len(added))

    def draw(self) -> float:
        """The next random number of this output, in [0, 1)."""
        return float(torch.rand(1, generator=self._generator, dtype=torch.float64))


def choose(logits: Sequence[torch.Tensor], choosers: Sequence[Chooser]) -> list[Choice | Exception]:
    """The next token of each request, from its logits [vocabulary].

    A request whose own rules fail gets the error instead, and the others their tokens. On a GPU all
    requests together take one wait. Each has random numbers of its own, so that its seed gives the
    same output beside others.
    """
    rows = torch.stack(list(logits)).float()
    errors = adjust(rows, choosers)
    draws = [
        _Draw(row, chooser, chooser.draw() if chooser.sampling.temperature > 0 else None)
        for row, chooser in enumerate(choosers)
        if row not in errors
    ]
    chosen: dict[int, Choice | Exception] = dict(errors)
    again = _choose(rows, draws, MOST_RANKED, chosen) if draws else []
    if again:
        _choose(rows, again, rows.shape[1], chosen)
    return [chosen[row] for row in range(len(choosers))]


@dataclass(frozen=True)
class _Draw:
    row: int  # among the rows
    chooser: Chooser
    point: float | None  # its random number; None: greedy

    @property
    def is_ranked(self) -> bool:
        """Whether only some of the most likely tokens are allowed."""
        rules = self.chooser.sampling
        return self.point is not None and bool(rules.top_k or rules.top_p < 1 or rules.min_p)


def adjust(rows: torch.Tensor, choosers: Sequence[Chooser]) -> dict[int, Exception]:
    """Apply penalties, biases and grammars to logits [requests, vocabulary], in place.

    Returns the errors of those whose own rules failed.
    """
    errors: dict[int, Exception] = {}
    size, flat = rows.shape[1], rows.view(-1)
    seen, factors, added, offsets = [], [], [], []
    for row, chooser in enumerate(choosers):
        repeated, (tokens, values) = chooser.seen(), chooser.offsets()
        named = np.concatenate([repeated, tokens])
        if len(named) and not 0 <= named.min() <= named.max() < size:
            errors[row] = IndexError(f"a penalty or bias is for no token of {size}")
            continue
        added.append(tokens + row * size)
        offsets.append(values)
        seen.append(repeated + row * size)
        factors.append(np.full(len(seen[-1]), chooser.sampling.repetition_penalty, np.float32))
    if any(map(len, seen)):
        indices, factor = _sent(rows.device, seen, factors)
        old = flat.index_select(0, indices)
        flat.index_copy_(0, indices, torch.where(old < 0, old * factor, old / factor))
    if any(map(len, added)):
        flat.index_add_(0, *_sent(rows.device, added, offsets))
    for row, chooser in enumerate(choosers):
        grammar = chooser.sampling.grammar
        if grammar is not None and row not in errors:
            try:
                grammar.restrict(rows[row])
            except Exception as error:
                errors[row] = error
    return errors


def _sent(
    device: torch.device, tokens: Sequence[Tokens], values: Sequence[npt.NDArray[np.float32]]
) -> tuple[torch.Tensor, torch.Tensor]:
    (indices,) = upload(device, np.concatenate(tokens))
    return indices, sent(torch.from_numpy(np.concatenate(values)), device)


def _choose(
    rows: torch.Tensor, draws: Sequence[_Draw], most: int, chosen: dict[int, Choice | Exception]
) -> list[_Draw]:
    """Choose among at least `most` tokens; returns the draws that need more candidates."""
    tokens = rows.max(dim=-1).indices  # as argmax, and twice as fast on CPUs
    is_short = torch.zeros_like(tokens, dtype=torch.bool)
    plain = [each for each in draws if each.point is not None and not each.is_ranked]
    ranked = [each for each in draws if each.is_ranked]
    counts = [min(each.chooser.sampling.top_k or most, rows.shape[1]) for each in ranked]
    if plain:
        indices, scaled, rules = _scaled(rows, plain)
        # Every token is allowed: no sorting, which takes far longer than the rest.
        tokens.index_copy_(0, indices, pick(scaled.softmax(dim=-1), rules["point"]))
    for count in dict.fromkeys(counts):  # which of two equal logits comes first depends on it
        same_k = [each for each, own in zip(ranked, counts, strict=True) if own == count]
        indices, scaled, rules = _scaled(rows, same_k)
        found, lacks = _draw_ranked(scaled, rules, count)
        tokens.index_copy_(0, indices, found)
        is_short.index_copy_(0, indices, lacks)
    columns = [tokens, is_short]
    num_top = max((each.chooser.sampling.top_logprobs or 0 for each in draws), default=0)
    if any(each.chooser.sampling.top_logprobs is not None for each in draws):
        logprobs = rows.log_softmax(dim=-1).nan_to_num_(LEAST_LOGPROB).clamp_min_(LEAST_LOGPROB)
        top = logprobs.topk(min(num_top, rows.shape[1]))
        num_top = top.values.shape[1]
        columns += [logprobs.gather(1, tokens[:, None]), top.indices, top.values]
    # In one dtype it is a single copy; float32 holds token ids exactly up to 2 ** 24.
    table = torch.cat([each.view(len(rows), -1).float() for each in columns], dim=1).tolist()
    for draw in draws:
        token, lacks, *rest = table[draw.row]
        chosen[draw.row] = _reported(int(token), rest, draw.chooser.sampling, num_top)
    return [draw for draw in ranked if table[draw.row][1]]


def _reported(token: int, found: Sequence[float], rules: Sampling, num_top: int) -> Choice:
    if rules.top_logprobs is None:
        return Choice(token)
    tokens, values = found[1 : 1 + num_top], found[1 + num_top :]
    top = zip(map(int, tokens), values, strict=True)
    return Choice(token, found[0], tuple(top)[: rules.top_logprobs])


def _scaled(
    rows: torch.Tensor, draws: Sequence[_Draw]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Row numbers, logits divided by temperature, and the rules, a column for each."""
    rules = [each.chooser.sampling for each in draws]
    # At 1, nothing is cut off: sums of many small numbers reach it too early.
    table = [
        (
            draw.point or 0.0,
            max(each.temperature, LEAST_TEMPERATURE),
            each.top_p if each.top_p < 1 else torch.inf,
            each.min_p,
            each.top_k,
        )
        for draw, each in zip(draws, rules, strict=True)
    ]
    precise = torch.float32 if rows.device.type == "mps" else torch.float64
    numbers = sent(torch.tensor(table, dtype=precise), rows.device)
    names = ("point", "temperature", "top_p", "min_p", "top_k")
    columns = dict(zip(names, torch.split(numbers, 1, dim=1), strict=True))
    (indices,) = upload(rows.device, [each.row for each in draws])
    chosen = rows.index_select(0, indices)
    top = chosen.max(dim=-1, keepdim=True).values
    return indices, (chosen - top) / columns["temperature"].float(), columns


def _draw_ranked(
    scaled: torch.Tensor, rules: dict[str, torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens among the most likely `count`; and whether top_p and min_p leave more than these."""
    size = scaled.shape[1]
    ranked, order = scaled.topk(count) if count <= MOST_RANKED else scaled.sort(descending=True)
    ranked, order = ranked[:, :count], order[:, :count]
    has_top_k = rules["top_k"] > 0
    # What probabilities are shares of.
    total = torch.where(
        has_top_k, ranked.logsumexp(dim=-1, keepdim=True), scaled.logsumexp(dim=-1, keepdim=True)
    )
    probabilities = (ranked - total).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    is_out = (before >= rules["top_p"].float()) | (
        probabilities < probabilities[:, :1] * rules["min_p"].float()
    )
    lacks = ~(is_out[:, -1:] | has_top_k) if count < size else torch.zeros_like(has_top_k)
    is_out[:, 0] = False
    indices = pick(probabilities.masked_fill(is_out, 0.0), rules["point"])
    return order.gather(1, indices[:, None])[:, 0], lacks[:, 0]


def pick(weights: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Draw an index in each row by weight [rows, count]; never one of weight 0."""
    sums = weights.to(point.dtype).cumsum(dim=-1)
    indices = torch.searchsorted(sums, point * sums[:, -1:], right=True)
    return indices[:, 0].clamp_max(sums.shape[1] - 1)
