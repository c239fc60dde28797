"""Value types that cross a stage border. No torch, no I/O, no behaviour beyond arithmetic."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, NewType, Protocol, TypeAlias

from kvboost.errors import ConfigError

PrefixKey = NewType("PrefixKey", bytes)
"""Key of a chunk and of all tokens before it: for exact reuse."""

ContentKey = NewType("ContentKey", bytes)
"""Key of a chunk's tokens alone: for approximate K/V."""

FrameKey: TypeAlias = PrefixKey | ContentKey
"""The key of a chunk in a tier: of its prefix if its K/V is exact, else of its content."""

Owner = NewType("Owner", bytes)
"""A tenant since its last deletion, under any model: the first half of a namespace."""

Namespace = NewType("Namespace", bytes)
"""Owner, model, encoding and prefill shapes: no key is in two namespaces."""

ReuseMode = Literal["off", "exact", "auto"]
"""Nothing; exact reuse only; also moved text, within the quality budget."""


FinishReason = Literal["stop", "length"]
"""Why an output ended: an end token, stop text or grammar; or the limit of new tokens."""


def prefix_key(parent: FrameKey, tokens: bytes) -> PrefixKey:
    """The key of a chunk, from its tokens and the key of the chunk before it."""
    return PrefixKey(sha256(parent + tokens).digest())


def percent(part: float, whole: float) -> str:
    """A share as text; "0%" means nothing and "100%" everything, never a rounded share."""
    if part <= 0 or part >= whole:
        return "0%" if part <= 0 else "100%"
    return f"{min(99, max(1, round(100 * part / whole)))}%"


def counted(count: int, noun: str) -> str:
    """A count with its noun, in the singular or the plural: "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class Provenance(enum.Enum):
    """How K/V came to be; decides which keys it may be stored under."""

    EXACT = "exact"  # every row below it was computed by the model from the tokens before it
    APPROXIMATE = "approximate"  # something below it was moved: never reachable by a prefix key


class MatchKind(enum.Enum):
    """What lookup found for a span of the prompt."""

    EXACT = "exact"  # same tokens after the same prefix
    MOVED = "moved"  # same tokens after another prefix
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of a prompt."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def within(self, limits: Span) -> Span:
        """The part of it inside `limits`, which may be empty."""
        start = max(self.start, limits.start)
        return Span(start, max(start, min(self.stop, limits.stop)))


LONGEST_QUESTION = 256
"""Tokens: of a longer live end of a prompt, the last ones are taken for the question."""

TOKEN_BYTES = 4
"""Tokens are compared, hashed and stored as little-endian u32."""


Anchor: TypeAlias = tuple[int, int]
"""Finds a chunk at any position: the offset of a window in the chunk, and its hash."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt that are stored, found and evicted together."""

    span: Span
    tokens: bytes


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The prefix keys of a chunk and of the chunk before it."""

    parent: PrefixKey
    prefix: PrefixKey


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of a stored chunk; its K/V is in a tier.

    Exact K/V is stored under its prefix key, approximate K/V under its content key.

    Raises:
        ValueError: the key does not fit the provenance.
    """

    tokens: bytes
    provenance: Provenance
    prefix: PrefixKey | None
    content: ContentKey | None
    parent: FrameKey | None  # of the chunk that it was computed after
    home: int  # position of its first token when it was computed
    space: Namespace

    def __post_init__(self) -> None:
        is_exact = self.provenance is Provenance.EXACT
        if (self.prefix is not None) != is_exact or (self.content is None) != is_exact:
            raise ValueError("exact K/V is named by its prefix, approximate K/V by its content")

    @property
    def key(self) -> FrameKey:
        """The key of its K/V."""
        key = self.prefix or self.content
        assert key is not None
        return key

    @property
    def num_tokens(self) -> int:
        """Length of the whole chunk."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens [offset, offset + len(span)) of a stored chunk match `span` of the prompt."""

    span: Span
    key: FrameKey
    num_tokens: int  # of the whole stored chunk, of which the span may be a part
    kind: MatchKind
    offset: int = 0
    delta: int = 0  # how far it has moved: position in the prompt minus position when computed
    follows: bool = False  # was computed directly after the match before it: no seam between them
    provenance: Provenance = Provenance.EXACT  # of the stored chunk

    def from_position(self, start: int) -> Match:
        """The same match from `start` on."""
        skipped = max(0, start - self.span.start)
        span = Span(self.span.start + skipped, self.span.stop)
        return replace(self, span=span, offset=self.offset + skipped)

    def to_position(self, stop: int) -> Match:
        """The same match up to `stop`."""
        return replace(self, span=Span(self.span.start, min(self.span.stop, stop)))


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring matches that were also computed one after the other: no seam between them."""

    span: Span
    kind: MatchKind
    delta: int


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What a prompt can take from the store; matches are sorted and do not overlap."""

    num_tokens: int
    matches: tuple[Match, ...] = ()

    def after(self, start: int) -> ReusePlan:
        """The same plan from `start` on."""
        rest = (match.from_position(start) for match in self.matches if match.span.stop > start)
        return ReusePlan(self.num_tokens, tuple(rest))

    def before(self, stop: int) -> ReusePlan:
        """The same plan up to `stop`."""
        rest = (match.to_position(stop) for match in self.matches if match.span.start < stop)
        return ReusePlan(self.num_tokens, tuple(rest))

    @property
    def num_reused(self) -> int:
        """How many tokens come from the store."""
        return sum(len(match.span) for match in self.matches)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The matches, joined to runs."""
        runs: list[Run] = []
        for match in self.matches:
            if match.follows and runs and runs[-1].span.stop == match.span.start:
                whole = Span(runs[-1].span.start, match.span.stop)
                runs[-1] = Run(whole, match.kind, match.delta)
            else:
                runs.append(Run(match.span, match.kind, match.delta))
        return tuple(runs)

    @property
    def moved(self) -> tuple[Span, ...]:
        """The spans of the moved runs."""
        return tuple(run.span for run in self.runs if run.kind is MatchKind.MOVED)

    @property
    def approximate_start(self) -> int:
        """Start of the first match whose K/V is approximate already."""
        starts = (m.span.start for m in self.matches if m.provenance is Provenance.APPROXIMATE)
        return min(starts, default=self.num_tokens)

    @property
    def live(self) -> tuple[Span, ...]:
        """The spans between the matches: what the model has to compute."""
        gaps, cursor = [], 0
        for match in self.matches:
            if match.span.start > cursor:
                gaps.append(Span(cursor, match.span.start))
            cursor = match.span.stop
        if cursor < self.num_tokens:
            gaps.append(Span(cursor, self.num_tokens))
        return tuple(gaps)


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """Cached tensors of one shape on one device. A plane is what one layer caches as K, or as V.

    Most models have one group of 2 x layers planes; MLA, per-layer head sizes and layers on
    several GPUs make more.
    """

    planes: tuple[int, ...]  # 2 * layer for K, 2 * layer + 1 for V, in storage order
    heads: int
    head_dim: int
    device: int | None = field(default=None, repr=False)  # GPU index; None: all on one device


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of a model's K/V: what `num_tokens` tokens occupy, and how."""

    num_layers: int
    groups: tuple[PlaneGroup, ...]
    dtype: str  # torch's name without the module, e.g. "bfloat16"
    itemsize: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' K and V for one token."""
        return self.itemsize * sum(len(g.planes) * g.heads * g.head_dim for g in self.groups)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a plane rotates with position: dims [offset, offset + 2 * len(inv_freq))."""

    inv_freq: tuple[float, ...] = field(repr=False)
    offset: int
    layout: Literal["half", "interleaved"]


class StoreListener(Protocol):
    """Receives changes of the cache, on the thread that makes them; must not block."""

    def added(self, key: bytes, tokens: bytes, parent: bytes | None) -> None:
        """A chunk was stored; `parent` is the key of the chunk before it."""

    def removed(self, key: bytes) -> None:
        """A chunk was removed."""


class Grammar(Protocol):
    """A constraint on the tokens of one output. Used by one thread."""

    @property
    def is_over(self) -> bool:
        """Whether the output is complete and must end."""

    def restrict(self, logits: Any) -> None:
        """Set the logits [vocabulary] of all forbidden tokens to -inf, in place."""

    def accept(self, token: int) -> None:
        """Continue after a chosen token."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose the tokens of an output and when to end it; for `KVBoost.submit`.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> from kvboost import Sampling
        >>> sampling = Sampling(max_new_tokens=64, stop=(".",))
        >>> engine.submit("The capital of France is", sampling).result().text
        ' Paris'
        >>> Sampling(temperature=0.7, top_p=2)
        Traceback (most recent call last):
        kvboost.errors.ConfigError: top_p=2: expected 0 to 1
    """

    max_new_tokens: int = 64  #: most tokens to generate
    temperature: float = 0.0  #: 0 is greedy, higher values sample
    top_k: int = 0  #: sample from that many most likely tokens; 0: from all
    top_p: float = 1.0  #: sample from the most likely tokens that together have this probability
    min_p: float = 0.0  #: drop tokens below this share of the highest probability
    seed: int | None = None  #: of the random numbers; None: a new one per request
    presence_penalty: float = 0.0  #: subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  #: the same, times the number of occurrences
    repetition_penalty: float = 1.0  #: as in Transformers, over prompt and output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  #: added to logits, by token
    stop: tuple[str, ...] = ()  #: texts that end the output; not part of it
    ignore_eos: bool = False  #: whether to continue after an end token
    top_logprobs: int | None = None  #: alternatives to report per token; None: no logprobs
    grammar: Grammar | None = None  #: constraint on the output; None: none

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (1, math.inf),
            "temperature": (0, math.inf),
            "top_k": (0, 2**31 - 1),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "top_logprobs": (0, math.inf),
            "seed": (-(2**63), 2**64 - 1),  # what torch takes
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                top = "" if high == math.inf else f" to {high}"
                raise ConfigError(f"{name}={value!r}: expected {low}{top or ' or more'}")
        if not self.repetition_penalty > 0:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty!r}: expected above 0")
        if "" in self.stop:
            raise ConfigError("stop contains an empty text")
