"""Messages between the two sides: the scheduler's decisions, and what the workers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvboost.core import Anchor, Entry, FrameKey, ReuseMode, ReusePlan


@dataclass(frozen=True, slots=True)
class Facts:
    """A worker's findings about its model at start."""

    fingerprint: bytes  # of the model, and of the part of it that this rank has
    refusal: str  # why nothing can be reused; empty: it can
    move_refusal: str  # why moved text cannot be reused
    must_prefetch: bool  # tiers below memory may hold chunks that it has not seen
    changes: tuple[Change, ...]  # chunks in its tiers from earlier processes
    epochs: Mapping[FrameKey, int] = field(default_factory=dict)  # of tenants, as far as it knows


@dataclass(frozen=True, slots=True)
class Change:
    """A chunk was indexed or, without an entry, removed."""

    key: FrameKey
    entry: Entry | None = None
    anchors: tuple[Anchor, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load what the tiers below memory have of a prompt, while it waits."""

    request_id: str
    tokens: Sequence[int]
    tenant: str
    reuse: ReuseMode


@dataclass(frozen=True, slots=True)
class Load:
    """Fill the rows [start, stop) of a request that waits: from the store, or by computing gaps."""

    request_id: str
    tokens: Sequence[int]
    tenant: str
    block_ids: Sequence[int]
    start: int
    stop: int
    plan: ReusePlan
    ratio: float  # of moved tokens that are repaired
    repaired: Sequence[int] = ()  # their positions
    # Stored chunks by the first rank's keys: the one before each, and its tokens. By these other
    # ranks, if there are any, find their part of moved text.
    chains: Mapping[FrameKey, tuple[FrameKey | None, bytes]] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is computed, so that the model is not needed."""
        return not self.plan.moved


@dataclass(frozen=True, slots=True)
class Save:
    """Store the rows of `tokens`, which are exact."""

    request_id: str
    tokens: Sequence[int]
    tenant: str
    block_ids: Sequence[int]
    is_last: bool  # the request has ended; its blocks are kept for this
    epoch: int = 0  # of the tenant when it got its blocks


@dataclass(frozen=True, slots=True)
class Audit:
    """Prefill an answer on moved text in full, compare it with what it was, and store it.

    The request has ended; its blocks are kept for this.
    """

    request_id: str
    tokens: Sequence[int]  # of prompt and answer
    num_prompt: int
    exact_stop: int
    tenant: str
    block_ids: Sequence[int]
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an audit; None: it did not finish."""

    request_id: str
    kl: float | None = None
    top1: float = 0.0


@dataclass(slots=True)
class StepWork:
    """The workers' tasks beside a step of the model."""

    prefetches: list[Prefetch] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    is_idle: bool = False  # the model has nothing to compute
    is_quiet: bool = False  # and nobody waits for it, so that audits may go on
    ends_audits: bool = False  # others want the blocks that they hold, or have for too long


@dataclass(slots=True)
class Report:
    """A worker's report after a step."""

    changes: list[Change] = field(default_factory=list)
    prefetched: list[str] = field(default_factory=list)
    epochs: Mapping[FrameKey, int] = field(default_factory=dict)  # of tenants, since it has asked
    failed: list[str] = field(default_factory=list)  # requests with failed loads, in part or whole
    repairs_s: dict[str, float] = field(default_factory=dict)  # seconds that moved loads took
    verdicts: list[Verdict] = field(default_factory=list)
