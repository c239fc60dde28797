"""Every option, once: name, default, unit and allowed range."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args

from kvboost.core import ReuseMode
from kvboost.errors import ConfigError

T = TypeVar("T")

MIB = 2**20
BUSY_SHARE = 0.5  # of the cores, in use by others
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?)B|B)?")
POWERS = {None: 0, "K": 1, "M": 2, "G": 3, "T": 4}
LEAST_SECRET = 16  # characters
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
EXACT_BITS = 16  # of `kv_cache_bits`: as the model computes it, whatever its dtype


STRATEGIES = ("sampled", "selective", "cacheblend", "query", "none")
"""How to repair moved text; docs/concepts/exact-and-moved.md compares cost and quality."""

MEASURING = ("cacheblend", "query")
"""Of these: what runs the model over moved text to choose."""


COMPANIES = ("any", "same")
"""Which copies of moved text may be used, by what they were computed after."""


BACKENDS = ("auto", "paged")
"""KV cache of running requests: contiguous buffers, or a pool of blocks."""


def option(
    default: T,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    is_secret: bool = False,
) -> T:
    """A field of an option class: default, help text and limits."""
    about = {"help": text, "low": low, "high": high}
    return field(default=default, repr=not is_secret, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `KVBoost(...)` and `KVBoost.from_pretrained(...)`."""

    reuse: ReuseMode = option(
        "exact",
        "what to reuse: 'off', 'exact' or 'auto' (moved text too); requests may override it",
    )
    recompute_strategy: str = option(
        "sampled", f"how to repair moved text: {', '.join(map(repr, STRATEGIES))}"
    )
    recompute_ratio: float = option(
        0.15, "share of moved tokens to repair (not with 'selective' and 'none')", low=0.0, high=1.0
    )
    recompute_overlap: int = option(
        16,
        "tokens to repair at the start of each moved text ('selective'; 'sampled': at most)",
        low=0,
    )
    company: str = option(
        "any",
        "moved text to use: 'any', or 'same': only copies whose preceding text is all in "
        "this prompt, too",
    )
    quality_budget: float = option(
        0.05,
        "largest mean KL divergence from a full prefill with 'auto', in nats per output token",
        low=0.0,
    )
    changed_budget: float = option(
        1.0,
        "largest share of outputs on moved text that a full prefill would word differently, "
        "by audits; 1: no limit",
        low=0.0,
        high=1.0,
    )
    audit_ratio: float = option(
        0.02,
        "share of requests with moved text to audit in idle time, after the first few",
        low=0.0,
        high=1.0,
    )
    promote: bool = option(
        default=True,
        text="after an answer on moved text, prefill its prompt and output exactly in idle time",
    )
    chunk_size: int = option(128, "tokens per chunk", low=8, high=4096)
    chunk_boundary_window: int = option(
        0,
        "tokens by which a chunk may be shorter, to end at a line or sentence; 0: fixed size",
        low=0,
    )
    max_cache_bytes: int = option(
        2048 * MIB, "budget of K/V in host memory, in bytes or as '4GiB'", low=1
    )
    tenant_quota: float = option(
        1.0, "share of the memory tier that one tenant may use", low=0.0, high=1.0
    )
    kv_cache_bits: int = option(
        EXACT_BITS, "bits per stored number: 16 is lossless; 8 and 4 are approximate"
    )
    disk_cache_dir: str | None = option(
        None, "folder of a disk tier below memory, which survives restarts"
    )
    max_disk_bytes: int = option(
        16384 * MIB, "budget of the disk tier, in bytes or as '4GiB'", low=MIB
    )
    cache_url: str | None = option(
        None,
        "tiers below memory, nearest first, separated by spaces: file:///folder, "
        "redis://host:port, rediss://, unix://, mooncake://host:port",
    )
    cache_secret: str | None = option(
        None,
        "secret of the processes that share a cache, 16 characters or more: frames are signed "
        "with it, others ignored",
        is_secret=True,
    )
    tier_deadline_ms: int = option(
        500,
        "milliseconds without data after which requests continue without a tier below memory",
        low=1,
    )
    max_chunks: int | None = option(None, "most chunks in memory; None: no limit", low=1)
    deterministic: bool = option(
        default=False, text="prefill in fixed pieces: cold and warm outputs are bitwise equal"
    )
    piece_tokens: int = option(
        512, "tokens per piece of deterministic prefill, a multiple of chunk_size", low=8
    )
    max_batch_size: int = option(16, "most requests in the batch", low=1)
    max_queue_size: int = option(256, "most requests waiting for the batch", low=1)
    batch_window_ms: int = option(0, "milliseconds an idle batch waits for more requests", low=0)
    inter_token_target_ms: int | None = option(
        None,
        "target inter-token latency while prompts prefill beside running requests; "
        "lower favours running requests, higher favours first tokens; None: prompts get "
        "as much of each step as decoding",
        low=1,
    )
    block_size: int = option(16, "tokens per block of the KV pool", low=1, high=4096)
    num_blocks: int | None = option(
        None,
        "blocks of the KV pool; None: max_cache_bytes, at least 1 GiB (on GPUs: 70 % of free "
        "memory)",
        low=1,
    )
    prepack_weights: bool = option(
        default=False,
        text="keep a second copy of the weights, for faster batches (bfloat16 on CPUs)",
    )
    strict: bool = option(
        default=True,
        text="raise UnsupportedModel if certification fails; False: run without reuse, "
        "in the library only",
    )
    backend: str = option(
        "auto", "KV cache of running requests: 'paged', a pool of blocks; 'auto' is the same"
    )

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, checked(each, getattr(self, each.name)))
        check_reuse(self.reuse)
        if self.recompute_strategy not in STRATEGIES:
            raise ConfigError(
                f"recompute_strategy={self.recompute_strategy!r}: expected one of "
                f"{', '.join(STRATEGIES)}"
            )
        for name, allowed in (("company", COMPANIES), ("backend", BACKENDS)):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        self._check_texts()
        if self.kv_cache_bits not in (EXACT_BITS, 8, 4):
            raise ConfigError(f"kv_cache_bits={self.kv_cache_bits!r}: expected 16, 8 or 4")
        if self.deterministic and self.kv_cache_bits != EXACT_BITS:
            raise ConfigError(
                f"deterministic=True requires kv_cache_bits=16, got {self.kv_cache_bits}: "
                "quantised K/V is approximate"
            )
        if self.chunk_boundary_window >= self.chunk_size:
            raise ConfigError(
                f"chunk_boundary_window={self.chunk_boundary_window} must be below "
                f"chunk_size={self.chunk_size}"
            )
        if self.deterministic and (
            self.chunk_boundary_window or self.piece_tokens % self.chunk_size
        ):
            raise ConfigError(
                "deterministic=True needs chunk_boundary_window=0 and piece_tokens a multiple of "
                f"chunk_size; got window {self.chunk_boundary_window}, pieces of "
                f"{self.piece_tokens}, chunks of {self.chunk_size}"
            )

    def _check_texts(self) -> None:
        for name in ("disk_cache_dir", "cache_url"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str | os.PathLike) and str(value)):
                raise ConfigError(f"{name}={value!r}: expected None or a non-empty text")
        secret = self.cache_secret
        if secret is not None and (not isinstance(secret, str) or len(secret) < LEAST_SECRET):
            raise ConfigError(f"cache_secret=***: expected at least {LEAST_SECRET} characters")

    @property
    def tier_urls(self) -> str:
        """All tiers below memory, nearest first."""
        folder = self.disk_cache_dir
        disk = "" if folder is None else Path(folder).expanduser().absolute().as_uri()
        return f"{disk} {self.cache_url or ''}"


class OptionValues(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for type checkers and editors."""

    reuse: ReuseMode
    recompute_strategy: str
    recompute_ratio: float
    recompute_overlap: int
    company: str
    quality_budget: float
    changed_budget: float
    audit_ratio: float
    promote: bool
    chunk_size: int
    chunk_boundary_window: int
    max_cache_bytes: int | str
    tenant_quota: float
    kv_cache_bits: int
    disk_cache_dir: str | None
    max_disk_bytes: int | str
    cache_url: str | None
    cache_secret: str | None
    tier_deadline_ms: int
    max_chunks: int | None
    deterministic: bool
    piece_tokens: int
    max_batch_size: int
    max_queue_size: int
    batch_window_ms: int
    inter_token_target_ms: int | None
    block_size: int
    num_blocks: int | None
    prepack_weights: bool
    strict: bool
    backend: str


def read_size(written: Any) -> Any:
    """Bytes of a size such as "4GiB", "1.5 GB" or "77"; anything else is returned as it is."""
    size = SIZE.fullmatch(written) if isinstance(written, str) else None
    if size is None:
        return written
    return int(float(size[1]) * (1024 if size[3] else 1000) ** POWERS[size[2]])


def choose_wait_policy() -> None:
    """On a busy machine, let torch's threads sleep while they wait; call it before torch loads.

    Spinning threads stall each other there. On an idle machine sleeping costs a quarter of the
    decode speed (docs/research-log.md), so torch's default stays.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY_SHARE * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def key_header(key: str) -> dict[str, str]:
    """The authorization header for an API key, if there is one.

    Raises:
        ConfigError: no header can hold the key, which is not shown.
    """
    key = key.strip()
    if not (key.isascii() and (not key or key.isprintable())):
        raise ConfigError("the API key has characters that no key has")
    return {"Authorization": f"Bearer {key}"} if key else {}


def certified_folder() -> Path:
    """Where certifications are kept: in $KVBOOST_HOME, or in the user's cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVBOOST_HOME") or Path(caches) / "kvboost") / "certified"


def option_names() -> list[str]:
    """The names of all options, in the order of their definition."""
    return [each.name for each in dataclasses.fields(Options)]


def make_options(values: Mapping[str, Any], also_known: Iterable[str] = ()) -> Options:
    """Check names and values.

    Raises:
        ConfigError: an unknown name (the nearest of the options and `also_known` is suggested)
            or a value out of range.
    """
    known = option_names()
    for name in values:
        if name not in known:
            raise unknown_option(name, [*known, *also_known])
    return Options(**values)


def unknown_option(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that nothing takes."""
    return ConfigError(f"unknown option {name!r}{hint(name, known)}")


def hint(name: str, known: Iterable[str]) -> str:
    """The end of an error message: what was probably meant."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_reuse(value: object) -> ReuseMode:
    """Pass a reuse mode on, or say which ones there are."""
    if value not in get_args(ReuseMode):
        raise ConfigError(f"reuse={value!r}: expected one of {', '.join(get_args(ReuseMode))}")
    return value  # type: ignore[return-value]


def checked(option: dataclasses.Field[Any], given: Any) -> Any:
    """The value of an option within its type and limits; sizes such as "4GiB" become bytes.

    Raises:
        ConfigError: the message shows name, value and what is allowed.
    """
    value = read_size(given) if option.name.endswith("_bytes") else given
    if value is None and option.default is None:
        return value
    if isinstance(option.default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{option.name}={value!r}: expected True or False")
    low, high = option.metadata["low"], option.metadata["high"]
    if low is None:
        return value
    is_whole = isinstance(option.default, int | None)
    kind: Any = int if is_whole else (int, float)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number and low <= value and (high is None or value <= high):
        return value
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    what = "whole number" if is_whole else "number"
    size = ", or a size such as '4GiB'" if option.name.endswith("_bytes") else ""
    raise ConfigError(f"{option.name}={value!r}: expected a {what} {limits}{size}")
