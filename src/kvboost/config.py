"""Every option, once: name, default, unit and allowed range."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from kvboost.core import ReuseMode
from kvboost.errors import ConfigError

MIB = 2**20
EXACT_BITS = 16  # of `kv_cache_bits`: as the model computes it, whatever its dtype


STRATEGIES = ("sampled", "selective", "cacheblend", "query", "sensitivity", "none")
"""How moved K/V is repaired; what each costs and gains is in docs/concepts/exact-and-moved.md."""


BACKENDS = ("auto", "slots", "paged")
"""Working memory of the batch: contiguous rows, or a pool of blocks."""


def about(text: str, *, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """A field's help text and the least and greatest value that it may have."""
    return {"help": text, "low": low, "high": high}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `KVBoost(...)` and `KVBoost.from_pretrained(...)` take besides the model."""

    reuse: ReuseMode = field(
        default="exact",
        metadata=about("what to reuse: 'off', 'exact' or 'auto'; a request may override it"),
    )
    recompute_strategy: str = field(
        default="sampled",
        metadata=about(f"how moved K/V is repaired: {', '.join(map(repr, STRATEGIES))}"),
    )
    recompute_ratio: float = field(
        default=0.15,
        metadata=about(
            "share of moved tokens that is computed again (not by 'selective' and 'none')",
            low=0.0,
            high=1.0,
        ),
    )
    recompute_overlap: int = field(
        default=16,
        metadata=about(
            "tokens at the start of each moved text to repair ('selective'; 'sampled': at most)",
            low=0,
        ),
    )
    recompute_tail: int = field(
        default=0,
        metadata=about("tokens at its end that 'selective' repairs (measured: no gain)", low=0),
    )
    quality_budget: float = field(
        default=0.05,
        metadata=about(
            "mean KL in nats per answer token, against full prefill, that audits of 'auto' allow",
            low=0.0,
        ),
    )
    audit_ratio: float = field(
        default=0.02,
        metadata=about(
            "share of answers on moved K/V that is audited in idle time, after the first few",
            low=0.0,
            high=1.0,
        ),
    )
    chunk_size: int = field(default=128, metadata=about("tokens in a chunk", low=8, high=4096))
    chunk_boundary_window: int = field(
        default=0,
        metadata=about(
            "tokens a cut may move back to end a chunk at a line or sentence; 0: cut on the grid",
            low=0,
        ),
    )
    max_cache_bytes: int = field(
        default=2048 * MIB, metadata=about("budget of the memory tier, in bytes", low=1)
    )
    tenant_quota: float = field(
        default=1.0,
        metadata=about("share of the memory tier that one tenant may hold", low=0.0, high=1.0),
    )
    kv_cache_bits: int = field(
        default=EXACT_BITS,
        metadata=about("bits of a stored number: 16 keeps it as it is, 8 and 4 are approximate"),
    )
    disk_cache_dir: str | None = field(
        default=None,
        metadata=about("folder of a disk tier below memory, which outlives the process"),
    )
    max_disk_bytes: int = field(
        default=16384 * MIB, metadata=about("budget of the disk tier, in bytes", low=MIB)
    )
    cache_url: str | None = field(
        default=None,
        metadata=about(
            "tiers below memory, nearest first, separated by blanks: file:///folder, "
            "redis://host:port, rediss://, unix://, mooncake://host:port"
        ),
    )
    tier_deadline_ms: int = field(
        default=500,
        metadata=about(
            "how long a tier below memory may deliver nothing before requests go on without it",
            low=1,
        ),
    )
    max_chunks: int | None = field(
        default=None, metadata=about("the most chunks to keep in memory; None: no limit", low=1)
    )
    deterministic: bool = field(
        default=False,
        metadata=about("prefill in fixed pieces, so that cold and warm runs are equal bit by bit"),
    )
    piece_tokens: int = field(
        default=512,
        metadata=about(
            "tokens in a piece of deterministic prefill, a multiple of chunk_size", low=8
        ),
    )
    max_batch_size: int = field(
        default=16, metadata=about("requests that are computed together at most", low=1)
    )
    max_queue_size: int = field(
        default=256, metadata=about("requests that may wait for the batch", low=1)
    )
    batch_window_ms: int = field(
        default=0,
        metadata=about("how long an idle batch waits for company before it starts", low=0),
    )
    inter_token_target_ms: int | None = field(
        default=None,
        metadata=about(
            "inter-token latency to aim for while prompts are prefilled beside running answers; "
            "lower favours running answers, higher favours first tokens; None: prompts get as "
            "much of each step as decoding",
            low=1,
        ),
    )
    block_size: int = field(
        default=16, metadata=about("tokens in a block of working K/V", low=1, high=4096)
    )
    num_blocks: int | None = field(
        default=None,
        metadata=about(
            "blocks of K/V for running requests; None: as many bytes as max_cache_bytes, at "
            "least 1 GiB",
            low=1,
        ),
    )
    prepack_weights: bool = field(
        default=False,
        metadata=about(
            "keep a second copy of the weights that makes batches faster (bfloat16 on CPUs)"
        ),
    )
    strict: bool = field(
        default=True,
        metadata=about("raise UnsupportedModel when certification fails; False: go without reuse"),
    )
    backend: str = field(
        default="auto",
        metadata=about(f"working memory of the batch: {', '.join(map(repr, BACKENDS))}"),
    )

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            check_range(each, getattr(self, each.name))
        check_reuse(self.reuse)
        if self.recompute_strategy not in STRATEGIES:
            raise ConfigError(
                f"recompute_strategy={self.recompute_strategy!r}: expected one of "
                f"{', '.join(STRATEGIES)}"
            )
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend={self.backend!r}: expected one of {', '.join(BACKENDS)}")
        for name in ("disk_cache_dir", "cache_url"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str | os.PathLike) and str(value)):
                raise ConfigError(f"{name}={value!r}: expected None or a text that is not empty")
        if self.kv_cache_bits not in (EXACT_BITS, 8, 4):
            raise ConfigError(f"kv_cache_bits={self.kv_cache_bits!r}: expected 16, 8 or 4")
        if self.deterministic and self.kv_cache_bits != EXACT_BITS:
            raise ConfigError(
                f"deterministic=True promises equal bits, kv_cache_bits={self.kv_cache_bits} "
                "does not keep them"
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

    @property
    def tier_urls(self) -> str:
        """All tiers below memory, nearest first."""
        folder = self.disk_cache_dir
        disk = "" if folder is None else Path(folder).expanduser().absolute().as_uri()
        return f"{disk} {self.cache_url or ''}"


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


def check_range(option: dataclasses.Field[Any], value: Any) -> None:
    """Compare a value with its option's type and limits.

    Raises:
        ConfigError: the message shows name, value and what is allowed.
    """
    if value is None and option.default is None:
        return
    if isinstance(option.default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{option.name}={value!r}: expected True or False")
    low, high = option.metadata["low"], option.metadata["high"]
    if low is None:
        return
    is_whole = isinstance(option.default, int | None)
    kind: Any = int if is_whole else (int, float)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number and low <= value and (high is None or value <= high):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    what = "whole number" if is_whole else "number"
    raise ConfigError(f"{option.name}={value!r}: expected a {what} {limits}")
