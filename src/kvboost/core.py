"""Value types that cross a stage border. No torch, no I/O, no behaviour beyond arithmetic."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal, NewType

PrefixKey = NewType("PrefixKey", bytes)
"""Names a chunk together with everything before it."""

ContentKey = NewType("ContentKey", bytes)
"""Names a chunk's tokens alone, wherever they stand."""

Namespace = NewType("Namespace", bytes)
"""Model, tenant and prefill shapes: keys of two namespaces never meet."""

ReuseMode = Literal["off", "exact", "auto"]
"""Nothing; what is exact; everything within the quality budget (so far that is what is exact)."""


class Provenance(enum.Enum):
    """How K/V came to be; decides which keys it may be stored under."""

    EXACT = "exact"  # every row below it was computed by the model from the tokens before it
    APPROXIMATE = "approximate"  # something below it was moved: never reachable by a prefix key


class MatchKind(enum.Enum):
    """What lookup found for a span of the prompt."""

    EXACT = "exact"  # same tokens, same history
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of a prompt."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


TOKEN_BYTES = 4
"""Tokens are compared, hashed and stored as little-endian u32."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the prompt that is stored and found as one."""

    span: Span
    tokens: bytes


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The names of one chunk. `parent` is the prefix key of the chunk before it."""

    parent: PrefixKey
    prefix: PrefixKey
    content: ContentKey


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of a stored chunk; the K/V itself lies in a tier.

    Raises:
        ValueError: approximate K/V was given a prefix key.
    """

    tokens: bytes
    content: ContentKey
    provenance: Provenance
    prefix: PrefixKey | None
    parent: PrefixKey | None

    def __post_init__(self) -> None:
        if self.provenance is Provenance.APPROXIMATE and self.prefix is not None:
            raise ValueError("approximate K/V must not be reachable by a prefix key")

    @property
    def num_tokens(self) -> int:
        """Length of the whole chunk."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The first `len(span)` tokens of a stored chunk stand at `span` of the prompt."""

    span: Span
    key: PrefixKey
    num_tokens: int  # of the whole stored chunk, of which the span may be a head
    kind: MatchKind


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What a prompt can take from the store; matches are sorted and do not overlap."""

    num_tokens: int
    matches: tuple[Match, ...] = ()

    @property
    def num_reused(self) -> int:
        """How many tokens come from the store."""
        return sum(len(match.span) for match in self.matches)

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
    """Cached tensors of one shape. A plane is what one layer caches as K, or as V.

    Most models have one group of 2 x layers planes; MLA and per-layer head sizes make several.
    """

    planes: tuple[int, ...]  # 2 * layer for K, 2 * layer + 1 for V, in storage order
    heads: int
    head_dim: int


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
    """How one plane turns with position: dims [offset, offset + 2 * len(inv_freq)) are rotated."""

    inv_freq: tuple[float, ...] = field(repr=False)
    offset: int
    layout: Literal["half", "interleaved"]
