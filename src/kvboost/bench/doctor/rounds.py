"""Prompts of several lengths, read in every way in turn, until the time is over."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvboost.bench.doctor.facts import NUM_OTHER_TOKENS, Reading
from kvboost.build import Parts
from kvboost.core import MatchKind, ReuseMode, Sampling
from kvboost.engine.batch.front import BatchFront
from kvboost.engine.request import Request, check_arguments
from kvboost.engine.texts import PREFACE
from kvboost.engine.worker import CallerThread
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.results import GenerationResult

LENGTHS = tuple(64 << step for step in range(10))  # to 32K
LEAST_LENGTHS = 2
LEAST_ROUNDS = 3  # that lengths are chosen for; a slow machine may come to fewer
MOST_ROUNDS = 8
PREFILLS = 3  # of a round, about: without reuse, as new text, moved and from the store
LEAD_TOKENS = 16  # before the text when it is stored
MOVED_LEAD_TOKENS = 32  # before it when it has moved
PILOT_TOKENS = (128, 1024)  # to choose lengths by; the second one if the first was quick
QUICK_MS = 500.0
NUM_DECODED = 16


def ask(
    parts: Parts,
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[int],
    reuse: ReuseMode,
    num_new: int = 1,
) -> GenerationResult:
    """The answer of an engine with these parts; what it stores is stored then."""
    request = request_of(parts, tokens, reuse, **check_arguments({}, num_new, parts.model))
    return BatchFront(parts, tokenizer, CallerThread()).run(request)


def request_of(parts: Parts, tokens: list[int], reuse: ReuseMode, **arguments: Any) -> Request:
    """A request without a tenant."""
    adapter = parts.model.adapter
    return Request(tokens=tokens, reuse=reuse, tenant="", adapter=adapter, arguments=arguments)


class Rounds:
    """An engine's parts, made ready for being measured."""

    def __init__(
        self, parts: Parts, tokenizer: PreTrainedTokenizerBase, longest: int | None
    ) -> None:
        """Run all ways once: what is compiled or allocated at first use is not measured.

        `longest` is what the model can read.

        Raises:
            ConfigError: that is too little.
        """
        if longest is not None and longest <= PILOT_TOKENS[0]:
            raise ConfigError(
                f"this model's context is {longest} tokens; measuring needs at least "
                f"{PILOT_TOKENS[0] + 1}"
            )
        self._parts, self._tokenizer = parts, tokenizer
        self._longest = longest
        self._random = random.Random(0)
        self._words = sorted(set(tokenizer(PREFACE, add_special_tokens=False).input_ids))
        self._read(LENGTHS[0])
        self.token_s = self._pace()

    def text(self, num_tokens: int) -> list[int]:
        """Tokens in an order that has not been before."""
        return self._random.choices(self._words, k=num_tokens)

    def run(
        self, until: float, say: Callable[[str], None]
    ) -> tuple[tuple[Reading, ...], tuple[float, ...]]:
        """Readings by length and the milliseconds of a decoded token, until the clock says so.

        One round at least.
        """
        lengths = fitting_lengths(self.token_s, until - time.perf_counter(), self._longest)
        taken: dict[int, list[dict[str, Any]]] = defaultdict(list)
        decode_ms: list[float] = []
        round_s = 0.0
        while len(decode_ms) < MOST_ROUNDS:
            started = time.perf_counter()
            if decode_ms and started + round_s > until:
                break
            say(f"round {len(decode_ms) + 1}: {', '.join(map(str, lengths))} tokens")
            for num_tokens in self._random.sample(lengths, len(lengths)):
                taken[num_tokens].append(self._read(num_tokens))
            decode_ms.append(self._decode_ms())
            round_s = time.perf_counter() - started
        readings = tuple(_reading(length, taken[length]) for length in lengths)
        return readings, tuple(decode_ms)

    def _pace(self) -> float:
        """Seconds of prefill per token, about."""
        short, long = PILOT_TOKENS
        short_ms = self._ask(self.text(short), "off").ttft_ms
        if short_ms > QUICK_MS or (self._longest is not None and self._longest <= long):
            return short_ms / 1e3 / short
        return self._ask(self.text(long), "off").ttft_ms / 1e3 / long

    def _read(self, num_tokens: int) -> dict[str, Any]:
        """Read a new text in all ways."""
        lead, text = self.text(LEAD_TOKENS), self.text(num_tokens)
        rest = NUM_OTHER_TOKENS - LEAD_TOKENS
        seen: dict[str, Any] = {}

        def full() -> None:
            whole = self.text(num_tokens + NUM_OTHER_TOKENS)
            seen["full_ms"] = self._ask(whole, "off").ttft_ms

        def stored() -> None:
            cold = self._ask([*lead, *text, *self.text(rest)], "auto")
            seen["cold_ms"] = cold.ttft_ms
            for way in self._random.sample([exact, moved], 2):
                way()

        def exact() -> None:
            seen["exact_ms"] = self._ask([*lead, *text, *self.text(rest)], "exact").ttft_ms

        def moved() -> None:
            end = self.text(NUM_OTHER_TOKENS - MOVED_LEAD_TOKENS)
            result = self._ask([*self.text(MOVED_LEAD_TOKENS), *text, *end], "auto")
            seen["moved_ms"] = result.ttft_ms
            seen["is_moved"] = result.reuse.tokens(MatchKind.MOVED) > 0

        for way in self._random.sample([full, stored], 2):
            way()
        self._forget()
        return seen

    def _forget(self) -> None:
        """Have nothing stored; what was learned of the machine's pace stays."""
        store = self._parts.store
        store.delete_all("", store.tiers.patience())

    def _ask(self, tokens: list[int], reuse: ReuseMode) -> GenerationResult:
        return ask(self._parts, self._tokenizer, tokens, reuse)

    def _decode_ms(self) -> float:
        request = request_of(self._parts, self.text(LENGTHS[0]), "off")
        sampling = Sampling(max_new_tokens=NUM_DECODED + 1, ignore_eos=True)
        front = BatchFront(self._parts, self._tokenizer, CallerThread())
        times = front.enqueue(request, sampling).result().token_times
        return 1e3 * (times[-1] - times[0]) / NUM_DECODED


def fitting_lengths(token_s: float, seconds: float, longest: int | None) -> Sequence[int]:
    """Lengths of which a few rounds take no longer than `seconds`, and that a model can read."""
    lengths: list[int] = []
    left_s = seconds / LEAST_ROUNDS
    for length in LENGTHS:
        num_tokens = length + NUM_OTHER_TOKENS
        left_s -= PREFILLS * num_tokens * token_s
        is_wanted = left_s >= 0 or len(lengths) < LEAST_LENGTHS
        if not is_wanted or (longest is not None and num_tokens + 1 > longest):
            break
        lengths.append(length)
    return lengths


def _reading(num_tokens: int, rounds: list[dict[str, Any]]) -> Reading:
    by_way = {name: tuple(each[name] for each in rounds) for name in rounds[0]}
    return Reading(num_tokens=num_tokens, **by_way)
