"""What a visit has measured, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

NUM_OTHER_TOKENS = 48  # of a measured prompt, around the text that is or is not stored


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    device: str
    num_cores: int  # that this process may use
    num_threads: int  # that torch computes with
    load: float | None  # mean number of running processes in the minute before
    available_bytes: int | None  # of memory, beside the loaded model
    wait_policy: str | None  # OMP_WAIT_POLICY
    num_machine_cores: int  # of all processes together, which the load is of


@dataclass(frozen=True)
class ModelFacts:
    """What was measured with; or why its K/V cannot be reused."""

    name: str
    dtype: str
    load_s: float
    certify_s: float = 0.0
    bytes_per_token: int = 0  # of K/V, as the model computes it
    int8_bytes_per_token: int = 0
    longest_tokens: int | None = None  # that the model reads, if it says so
    refusal: str = ""  # why nothing can be reused
    move_refusal: str = ""  # why text cannot be reused at another place


@dataclass(frozen=True)
class Reading:
    """Times to the first token with a text of `num_tokens` in the prompt, a value for each round.

    Without reuse, with reuse of nothing because the text is new, with the text stored at the
    beginning, and with the text stored behind other text.
    """

    num_tokens: int
    full_ms: tuple[float, ...]
    cold_ms: tuple[float, ...]
    exact_ms: tuple[float, ...]
    moved_ms: tuple[float, ...]
    is_moved: tuple[bool, ...]  # whether the engine took the moved text, or computed it as faster

    def share(self, times_ms: tuple[float, ...]) -> float:
        """Times as a share of those without reuse in the same round, the median."""
        return median(ours / full for ours, full in zip(times_ms, self.full_ms, strict=True))

    @property
    def spread(self) -> float:
        """The slowest of equal prefills against the fastest."""
        return max(self.full_ms) / min(self.full_ms)


@dataclass(frozen=True)
class TierSpeed:
    """How fast a tier takes frames and gives them back; or why it does not."""

    name: str
    put_bytes_per_s: float = 0.0
    get_bytes_per_s: float = 0.0  # checked where the tier is not memory, and copied
    answer_ms: float = 0.0  # until it says that it has nothing
    free_bytes: int | None = None  # room that is left there, if known
    problem: str = ""

    def load_ms(self, num_bytes: int) -> float:
        """Until so many bytes are here."""
        return self.answer_ms + 1e3 * num_bytes / self.get_bytes_per_s


@dataclass(frozen=True)
class MovedQuality:
    """One answer on moved text against the same answer after a full prefill."""

    mean_kl: float
    top1_ratio: float


@dataclass(frozen=True)
class Packing:
    """A step of several sequences with plain weights and with a rearranged copy of them."""

    plain_ms: float
    packed_ms: float
    num_sequences: int
    weight_bytes: int  # about what the copy takes


@dataclass(frozen=True)
class Step:
    """A decode step of several answers, by the engine and by Transformers alone."""

    num_answers: int
    engine_ms: float
    transformers_ms: float = 0.0


@dataclass(frozen=True)
class DeviceFacts:
    """A GPU, and the way to it."""

    name: str
    capability: str
    total_bytes: int | None
    versions: dict[str, str]
    attention: str  # as certified
    launch_us: float  # of a trivial kernel
    copy_bytes_per_s: dict[str, float]  # by kind of host memory and direction
    steps: tuple[Step, ...]
    peak_bytes: int | None  # of device memory that torch has taken, the KV pool included


@dataclass(frozen=True)
class Visit:
    """All of it. Without readings where the model was refused."""

    machine: Machine
    model: ModelFacts
    readings: tuple[Reading, ...] = ()  # shortest text first
    decode_ms: tuple[float, ...] = ()  # per token, a value for each round
    tiers: tuple[TierSpeed, ...] = ()
    quality: MovedQuality | None = None
    packing: Packing | None = None
    device: DeviceFacts | None = None  # None on CPUs

    @property
    def prefill_ms(self) -> float:
        """Per token, of the longest prompt that was measured."""
        longest = self.readings[-1]
        return median(longest.full_ms) / (longest.num_tokens + NUM_OTHER_TOKENS)

    def tier(self, name: str) -> TierSpeed | None:
        """A tier that was measured and works."""
        return next((each for each in self.tiers if each.name == name and not each.problem), None)
