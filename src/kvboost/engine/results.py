"""What the engine's calls return."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

from kvboost.core import MatchKind, ReuseMode, Span


class GenerationMode(enum.Enum):
    """How much a request may reuse, by the names of the original package.

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
        """The same as a `reuse` argument.

        Example:
            >>> from kvboost import GenerationMode
            >>> [mode.reuse for mode in GenerationMode]
            ['off', 'exact', 'auto']
        """
        return self.value


@dataclass(frozen=True)
class SpanReport:
    """What became of one span of the prompt."""

    span: Span
    kind: MatchKind
    reason: str = ""  # why it was not reused, or was moved, as far as that is known


@dataclass(frozen=True)
class ReuseReport:
    """Where a prompt's K/V came from, and what finding it cost; prints as a sentence.

    Example:
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> warmed = engine.warm(manual)
        >>> report = engine.generate(manual + " Where is the pump?", max_new_tokens=4).reuse
        >>> for each in report.spans:
        ...     print(each.span.start, each.span.stop, each.kind.value)
        0 88 exact
        88 93 miss
    """

    spans: tuple[SpanReport, ...]  #: without gaps, in the order of the prompt
    lookup_ms: float = 0.0
    load_ms: float = 0.0
    repaired_tokens: int = 0  #: moved tokens that were computed again
    predicted_ms: float | None = None  #: prefill with this reuse, as expected before it ran
    full_ms: float | None = None  #: prefill without any reuse, as expected
    actual_ms: float | None = None  #: prefill as it was, lookup and load included
    note: str = ""  #: why nothing was looked for, or what the quality budget decided

    def __str__(self) -> str:
        exact, moved, missed = (self.tokens(kind) for kind in MatchKind)
        parts = [
            f"{exact} tokens exact, {moved} moved ({self.repaired_tokens} of them computed again)"
        ]
        parts.append(f"{missed} computed")
        times = {
            "predicted": self.predicted_ms,
            "took": self.actual_ms,
            "without reuse": self.full_ms,
        }
        parts += [f"{name} {ms:.0f} ms" for name, ms in times.items() if ms is not None]
        return ", ".join(parts) + (f"; {self.note}" if self.note else "")

    def tokens(self, kind: MatchKind) -> int:
        """Count the prompt's tokens of one kind.

        Example:
            >>> from kvboost.core import MatchKind
            >>> manual = 8 * " In winter the pump is kept in the cellar."
            >>> warmed = engine.warm(manual)
            >>> report = engine.explain(manual + " Where is the pump?")
            >>> [report.tokens(kind) for kind in (MatchKind.EXACT, MatchKind.MOVED, MatchKind.MISS)]
            [88, 0, 5]
        """
        return sum(len(report.span) for report in self.spans if report.kind is kind)


@dataclass(frozen=True)
class GenerationResult:
    """An answer and how it was made. Times start when the caller called.

    Example:
        >>> result = engine.generate("The capital of France is", max_new_tokens=2)
        >>> result.output_text, len(result.token_ids), result.prompt_tokens, result.cached_tokens
        (' Paris.', 2, 5, 0)
        >>> 0 < result.ttft_ms <= result.total_ms
        True
        >>> list(result.stages_ms)
        ['tokenize', 'wait', 'lookup', 'load', 'select', 'forward', 'decode']
    """

    output_text: str  #: what is new, without the prompt
    token_ids: list[int]  #: what is new, without the prompt
    ttft_ms: float  #: until the first token was there, with lookup, load and prefill
    total_ms: float
    prompt_tokens: int
    cached_tokens: int  #: prompt tokens that were not computed
    reuse: ReuseReport
    output_texts: list[str] = field(repr=False)  #: all, where several sequences were asked for
    output: Any = field(repr=False)  #: what Transformers' generate() returned, without the cache
    #: Where the time went, in the order of the call. Its stages are tokenize, wait (for its turn),
    #: lookup, load (buffers included), select (what is computed again), forward and decode; in a
    #: batch wait, lookup, load, forward and decode.
    stages_ms: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of the prompt that was not computed, 0..1.

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
        """New tokens by the whole time of the call, in seconds.

        Example:
            >>> engine.generate("The capital of France is", max_new_tokens=2).tokens_per_sec > 0
            True
        """
        return len(self.token_ids) / (self.total_ms / 1e3)


@dataclass(frozen=True)
class WarmResult:
    """What `warm` read and stored.

    Example:
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> first, second = engine.warm(manual), engine.warm(manual)
        >>> first.num_tokens, first.num_computed, second.num_computed
        (88, 88, 1)
    """

    num_texts: int
    num_tokens: int
    num_computed: int  #: tokens that were not in the store before, and always the last one
    num_pinned: int  #: chunks
    total_ms: float


@dataclass(frozen=True)
class PromptCheck:
    """One prompt with reuse against the same prompt without."""

    prompt_tokens: int
    cached_tokens: int
    max_kl: float  # nats, worst answer token
    mean_kl: float
    top1_ratio: float  # answer tokens whose most likely next token is the same
    first_difference: int | None  # index of the first answer token that differs, None if none does


@dataclass(frozen=True)
class CorrectnessReport:
    """True when every prompt reused something and no answer moved further than allowed.

    Prints as a sentence.

    Example:
        >>> manual = 8 * " In winter the pump is kept in the cellar."
        >>> report = engine.verify_correctness([manual + " Where is it?"], max_new_tokens=4)
        >>> print(report)
        correct: 1 of 1 answers the same, worst KL ..., 91 of 92 prompt tokens reused
        >>> report.checks[0].top1_ratio
        1.0
    """

    checks: tuple[PromptCheck, ...]  #: one for each prompt; with "auto" for those with moved text
    tolerance_kl: float  #: nats
    must_agree: bool  #: whether answers must be the same token by token (not so in 16-bit dtypes)
    of_mean: bool = False  #: whether the tolerance is for an answer's mean, not its worst token

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
            return "nothing was reused, so nothing was checked: prompts too short or nothing shared"
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
    """A token of an answer, how likely it was, and the likeliest in its place."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...]  # (token, text, logprob), the likeliest first


@dataclass(frozen=True)
class Delta:
    """What came new of an answer. `text` may be empty while a stop text or a character is open."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Phases:
    """Where the time of a request went, in seconds; they follow each other."""

    queue: float = 0.0  # from the call until it joined the batch
    lookup: float = 0.0
    load: float = 0.0  # from the store into its rows
    prefill: float = 0.0  # until the first token was there
    decode: float = 0.0


@dataclass(frozen=True)
class Completion:
    """An answer of the batch."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed
    reuse: ReuseReport
    phases: Phases
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    token_times: tuple[float, ...] = field(default=(), repr=False)  # seconds since the call
