"""What the engine's calls return."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from kvboost.config import EXACT_BITS
from kvboost.core import FinishReason, MatchKind, ReuseMode, Span, counted, percent

SHOWN_TEXT = 72  # characters of an output in `print(result)`


class GenerationMode(enum.Enum):
    """What a request may reuse, under the names of the original package; see `reuse`.

    Example:
        >>> from kvboost import GenerationMode
        >>> mode = GenerationMode.BASELINE
        >>> engine.generate("The capital of France is", max_new_tokens=2, mode=mode).cached_tokens
        0
    """

    BASELINE = "off"
    PREFIX_CACHE = "exact"
    CHUNK_KV_REUSE = "auto"

    @property
    def reuse(self) -> ReuseMode:
        """The equivalent `reuse` argument.

        Example:
            >>> from kvboost import GenerationMode
            >>> [mode.reuse for mode in GenerationMode]
            ['off', 'exact', 'auto']
        """
        return self.value


@dataclass(frozen=True)
class SpanReport:
    """How one span of the prompt was handled."""

    span: Span
    kind: MatchKind
    reason: str = ""  # why it was moved or computed, if known


@dataclass(frozen=True)
class ReuseReport:
    """Where a prompt's K/V came from, and how long it took; prints as one line.

    Example:
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> warmed = engine.warm(manual)
        >>> report = engine.generate(manual + " Where is the pump?", max_new_tokens=4).reuse
        >>> for each in report.spans:
        ...     print(each.span.start, each.span.stop, each.kind.value)
        0 88 exact
        88 93 miss
    """

    spans: tuple[SpanReport, ...]  #: the whole prompt, in order and without gaps
    lookup_ms: float = 0.0  #: time to find stored chunks
    load_ms: float = 0.0  #: time to load their K/V
    repaired_tokens: int = 0  #: moved tokens that were computed again
    predicted_ms: float | None = None  #: predicted prefill time with this reuse
    full_ms: float | None = None  #: predicted time of a full prefill
    actual_ms: float | None = None  #: measured prefill time, lookup and loading included
    note: str = ""  #: why nothing was looked up, or what the guardrail decided
    kv_cache_bits: int = EXACT_BITS  #: bits per stored number; below 16 no reuse is exact

    def __str__(self) -> str:
        exact, moved, missed = (self.tokens(kind) for kind in MatchKind)
        kind = "exact"
        if self.kv_cache_bits < EXACT_BITS:
            kind = f"reused from {self.kv_cache_bits}-bit K/V"
        parts = [
            f"{counted(exact, 'token')} {kind}",
            f"{moved} moved ({self.repaired_tokens} of them computed again)",
            f"{missed} computed",
        ]
        times = {
            "predicted": self.predicted_ms,
            "took": self.actual_ms,
            "without reuse": self.full_ms,
        }
        parts += [f"{name} {ms:.0f} ms" for name, ms in times.items() if ms is not None]
        return ", ".join(parts) + (f"; {self.note}" if self.note else "")

    def tokens(self, kind: MatchKind) -> int:
        """Count the prompt tokens of one kind.

        Args:
            kind: `MatchKind.EXACT`, `MOVED` or `MISS`.

        Example:
            >>> from kvboost.core import MatchKind
            >>> manual = 8 * " In winter the pump is kept in the cellar."
            >>> warmed = engine.warm(manual)
            >>> report = engine.explain(manual + " Where is the pump?")
            >>> [report.tokens(kind) for kind in (MatchKind.EXACT, MatchKind.MOVED, MatchKind.MISS)]
            [88, 0, 5]
        """
        return sum(len(report.span) for report in self.spans if report.kind is kind)


def finish_reason(num_new: int, limit: int, *, is_stopped: bool) -> FinishReason | None:
    """Why an output of `num_new` tokens ends here, or None; a stop counts before the limit."""
    if is_stopped:
        return "stop"
    return "length" if num_new >= limit else None


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """An output with its times and what was reused; prints as two lines.

    Example:
        >>> result = engine.generate("The capital of France is", max_new_tokens=2)
        >>> result.output_text, result.finish_reason, result.prompt_tokens, result.cached_tokens
        (' Paris.', 'length', 5, 0)
        >>> print(result)
        Paris.
        0% of 5 prompt tokens reused; 2 tokens in ... ms, the first after ... ms; ended by length
        >>> 0 < result.ttft_ms <= result.total_ms
        True
        >>> list(result.stages_ms)
        ['tokenize', 'wait', 'lookup', 'load', 'forward', 'decode']
    """

    output_text: str  #: generated text, without the prompt
    token_ids: list[int]  #: generated tokens, without the prompt
    #: "stop" (an end token, stop text or stopping criterion) or "length" (the token limit)
    finish_reason: FinishReason
    ttft_ms: float  #: time to first token, from the call
    total_ms: float  #: time of the whole call
    prompt_tokens: int  #: length of the prompt
    cached_tokens: int  #: prompt tokens that were not computed
    reuse: ReuseReport  #: what was reused, span by span
    output_texts: list[str]  #: one text per sequence, with `num_return_sequences`
    #: return value of Transformers' `generate()`, without the cache; None if KVBoost generated the
    #: output itself: greedy, with no arguments but `max_new_tokens` and `repetition_penalty`
    output: Any
    #: Time by stage, in order: tokenize, wait (for a turn), lookup, load, forward and decode.
    stages_ms: dict[str, float] = field(default_factory=dict)
    #: with `order="any"`: the numbers of `documents` in the order that the prompt had
    document_order: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = " ".join(self.output_text.split())
        if len(text) > SHOWN_TEXT:
            text = f"{text[:SHOWN_TEXT]}..."
        return (
            f"{text}\n{percent(self.cached_tokens, self.prompt_tokens)} of "
            f"{counted(self.prompt_tokens, 'prompt token')} reused; "
            f"{counted(len(self.token_ids), 'token')} in {self.total_ms:.0f} ms, "
            f"the first after {self.ttft_ms:.0f} ms; ended by {self.finish_reason}"
        )

    def __repr__(self) -> str:
        text, _, figures = str(self).rpartition("\n")
        return f"GenerationResult({text!r}, {figures})"

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of prompt tokens that were not computed, 0 to 1.

        Example:
            >>> manual = 8 * " In winter the pump is kept in the cellar."
            >>> warmed = engine.warm(manual)
            >>> result = engine.generate(manual + " Where is the pump?", max_new_tokens=4)
            >>> round(result.kv_reuse_ratio, 2)
            0.95
        """
        return self.cached_tokens / self.prompt_tokens

    @property
    def tokens_per_sec(self) -> float:
        """Generated tokens per second of the whole call.

        Example:
            >>> engine.generate("The capital of France is", max_new_tokens=2).tokens_per_sec > 0
            True
        """
        return len(self.token_ids) / (self.total_ms / 1e3)


@dataclass(frozen=True)
class WarmResult:
    """What `warm` computed and stored.

    Example:
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> first, second = engine.warm(manual), engine.warm(manual)
        >>> first.num_tokens, first.num_computed, second.num_computed
        (88, 88, 1)
    """

    num_texts: int  #: texts given
    num_tokens: int  #: tokens in all texts
    num_computed: int  #: tokens not stored before; the last token of a text is always computed
    num_pinned: int  #: chunks pinned
    total_ms: float  #: time of the whole call


@dataclass(frozen=True)
class PromptCheck:
    """One prompt with reuse compared with its full prefill."""

    prompt_tokens: int
    cached_tokens: int
    max_kl: float  # nats, worst output token
    mean_kl: float
    top1_ratio: float  # top-1 agreement, 0 to 1
    first_difference: int | None  # index of the first output token that differs; None: no one does


@dataclass(frozen=True)
class CorrectnessReport:
    """Result of `verify_correctness`; prints as one line.

    True when every prompt reused K/V and no output exceeds the tolerance.

    Example:
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> report = engine.verify_correctness([manual + " Where is it?"], max_new_tokens=4)
        >>> print(report)
        correct: 1 of 1 answers the same, worst KL ..., 91 of 92 prompt tokens reused
        >>> report.checks[0].top1_ratio
        1.0
    """

    checks: tuple[PromptCheck, ...]  #: one per prompt; with "auto" one per prompt with moved text
    tolerance_kl: float  #: largest KL divergence allowed, in nats
    must_agree: bool  #: whether outputs must be equal token by token; False in 16-bit dtypes
    of_mean: bool = False  #: whether the tolerance holds for an output's mean, not its worst token

    def __bool__(self) -> bool:
        return bool(self.checks) and all(self._holds(check) for check in self.checks)

    def _holds(self, check: PromptCheck) -> bool:
        agrees = check.first_difference is None or not self.must_agree
        return check.cached_tokens > 0 and agrees and self._kl(check) <= self.tolerance_kl

    def _kl(self, check: PromptCheck) -> float:
        return check.mean_kl if self.of_mean else check.max_kl

    def __str__(self) -> str:
        reused = sum(check.cached_tokens for check in self.checks)
        if reused == 0:
            return (
                "nothing checked, because nothing was reused: prompts too short or nothing shared"
            )
        verdicts = ("within budget", "OVER BUDGET") if self.of_mean else ("correct", "NOT CORRECT")
        same = sum(check.first_difference is None for check in self.checks)
        worst, what = max(map(self._kl, self.checks)), "mean KL" if self.of_mean else "KL"
        total = sum(check.prompt_tokens for check in self.checks)
        return (
            f"{verdicts[0] if self else verdicts[1]}: "
            f"{same} of {len(self.checks)} answers the same, "
            f"worst {what} {worst:.2g} (allowed {self.tolerance_kl:.2g}), "
            f"{reused} of {total} prompt tokens reused"
        )


@dataclass(frozen=True)
class TokenLogprob:
    """An output token with its log probability and the most likely alternatives."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...]  # (token, text, logprob), most likely first


@dataclass(frozen=True)
class Delta:
    """A new piece of an output; `text` is empty while a stop text or a character is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Phases:
    """Time of a request by phase, in seconds and in order."""

    queue: float = 0.0  # from the call until the request joins the batch
    lookup: float = 0.0
    load: float = 0.0  # from the cache into the batch
    prefill: float = 0.0  # until the first output token
    decode: float = 0.0


@dataclass(frozen=True)
class Completion:
    """The output of a request in the batch."""

    text: str  #: generated text, without the prompt
    token_ids: tuple[int, ...]  #: generated tokens, without the prompt
    finish_reason: FinishReason  #: "stop" (an end token, stop text or grammar) or "length"
    prompt_tokens: int  #: length of the prompt
    cached_tokens: int  #: prompt tokens that were not computed
    reuse: ReuseReport  #: what was reused, span by span
    phases: Phases  #: time by phase
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)  #: with `top_logprobs`
    #: when each token was generated, in seconds since the call
    token_times: tuple[float, ...] = field(default=(), repr=False)
