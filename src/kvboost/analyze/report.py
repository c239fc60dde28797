"""The report of an analysis: tables, JSON, a plot, and what reuse saves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvboost.analyze.curve import Curve, Findings, Share
from kvboost.analyze.fleet import FleetResult, Setup
from kvboost.drawing.plots import Line, Scale, lines
from kvboost.drawing.standalone import standalone
from kvboost.errors import ConfigError

NUM_SIZES = 10
DAY_S = 86_400.0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
LEAST_SPAN_S = 60.0  # shorter logs tell nothing of a day
# On light and on dark pages.
PREFIX_COLOURS = (
    ("#1f5a94", "#6aa5de"), ("#4f8fc7", "#8fc1ee"), ("#2a8c82", "#52bdb2"), ("#7a6cc0", "#a99df0"),
)  # fmt: skip
CONTENT_COLOUR = ("#c2571a", "#ff8f4d")


@dataclass(frozen=True)
class Prices:
    """What a token costs, as far as it is known."""

    kv_bytes: float | None = None  # of one token
    prefill_tokens_per_s: float | None = None
    per_million_tokens: float | None = None  # of prompts, in any currency

    @property
    def is_known(self) -> bool:
        """Whether anything can be said of time or money."""
        return bool(self.saved(0.0))

    def saved(self, num_tokens: float) -> dict[str, float]:
        """Hours of prefill and money for tokens that need not be computed."""
        saved = {}
        if self.prefill_tokens_per_s is not None:
            saved["prefill_h"] = num_tokens / self.prefill_tokens_per_s / 3600
        if self.per_million_tokens is not None:
            saved["money"] = num_tokens / 1e6 * self.per_million_tokens
        return saved


@dataclass(frozen=True)
class Analysis:
    """A log's findings and all that is asked about them."""

    findings: Findings
    sizes: Sequence[float]  # of caches, in tokens
    prices: Prices
    num_skipped: int  # broken lines
    fleets: Sequence[tuple[Setup, FleetResult]] = ()


def sizes_to_show(findings: Findings) -> list[float]:
    """Round numbers from a thousand tokens up to the first that holds everything."""
    most = max(
        (curve.distinct_tokens for curve in (*findings.prefix.values(), findings.content) if curve),
        default=0.0,
    )
    rounds = [factor * 10.0**power for power in range(3, 15) for factor in (1, 2, 5)]
    num_below = sum(size < most for size in rounds)
    return rounds[max(0, num_below + 1 - NUM_SIZES) : num_below + 1]


def kv_bytes_of(config: Path) -> float:
    """Bytes of K/V for a token of the model whose config.json this is."""
    try:
        read = json.loads(config.read_text())
        fields = read.get("text_config") or read
        layers = fields["num_hidden_layers"]
        size = DTYPE_BYTES[fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"]
        if fields.get("kv_lora_rank"):  # one compressed vector for K and V of all heads
            return float(layers * (fields["kv_lora_rank"] + fields["qk_rope_head_dim"]) * size)
        heads = fields["num_attention_heads"]
        head_dim = fields.get("head_dim") or fields["hidden_size"] // heads
        return float(layers * (fields.get("num_key_value_heads") or heads) * head_dim * 2 * size)
    except (ValueError, AttributeError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{config}: not a model's config.json: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{config}: K/V bytes cannot be told: unknown or no {error}") from error


def curves_of(findings: Findings) -> dict[str, Curve]:
    """All curves, by display name."""
    curves = {f"prefix {size}": curve for size, curve in findings.prefix.items()}
    return curves | ({"content": findings.content} if findings.content else {})


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Everything, as plain values; shares are 0..1, `error` is half of a 95 % interval."""
    findings = analysis.findings
    period, factor = _period(findings)
    curves = {}
    for name, curve in curves_of(findings).items():
        curves[name] = {
            "share_of_tokens": asdict(curve.share()),
            "share_of_names": asdict(curve.share_of_names()),
            "num_names": curve.num_names,
            "distinct_tokens": curve.distinct_tokens,
            "sampling_rate": curve.sampling_rate,
            "by_cache_tokens": [
                {
                    "cache_tokens": size,
                    "cache_bytes": analysis.prices.kv_bytes and size * analysis.prices.kv_bytes,
                    **asdict(curve.share(size)),
                    **analysis.prices.saved(curve.share(size).value * curve.num_tokens * factor),
                }
                for size in analysis.sizes
            ],
        }
    return {
        "num_requests": findings.num_requests,
        "num_skipped_lines": analysis.num_skipped,
        "prompt_tokens": _num_tokens(findings),
        "span_s": findings.span_s,
        "saved_per": period,
        "curves": curves,
        "fleets": [_fleet_json(*fleet) for fleet in analysis.fleets],
    }


def _fleet_json(setup: Setup, result: FleetResult) -> dict[str, Any]:
    limit = None if math.isinf(setup.cache_tokens) else setup.cache_tokens
    return {
        "num_replicas": setup.num_replicas,
        "routing": setup.routing,
        "cache_tokens_each": limit,
        "reused": _reused(result),
        **asdict(result),
    }


def as_text(analysis: Analysis) -> str:
    """The tables."""
    findings = analysis.findings
    parts = [
        f"{findings.num_requests:,} requests, {_count(_num_tokens(findings))} prompt tokens"
        + (f" in {_duration(findings.span_s)}" if findings.span_s else ""),
        _any_size(findings),
        _by_size(analysis),
    ]
    if analysis.prices.is_known:
        parts.append(_savings(analysis))
    if analysis.fleets:
        parts.append(_fleets(analysis))
    return "\n\n".join(parts) + "\n"


def _any_size(findings: Findings) -> str:
    rows = [["reused by a cache of any size", "of tokens", "of blocks or pieces"]]
    for name, curve in curves_of(findings).items():
        rows.append([name, _percent(curve.share()), _percent(curve.share_of_names())])
    text = _aligned(rows)
    text += "\nprefix N: beginnings of earlier prompts, in whole blocks of N tokens (exact)"
    if findings.content:
        text += "\ncontent: text of earlier prompts, wherever it stands now (approximate if moved)"
    else:
        text += "\ncontent: cannot be told, a hash trace names blocks by all that is before them"
    rate = min((curve.sampling_rate for curve in curves_of(findings).values()), default=1.0)
    if rate < 1:
        text += f"\n1 of {1 / rate:.0f} names was followed; ± holds the truth in 19 of 20 logs"
    return text


def _by_size(analysis: Analysis) -> str:
    curves = curves_of(analysis.findings)
    kv_bytes = analysis.prices.kv_bytes
    rows = [["cache tokens", *(["K/V"] if kv_bytes else []), *curves]]
    for size in analysis.sizes:
        in_bytes = [_bytes(size * kv_bytes)] if kv_bytes else []
        shares = [_percent(curve.share(size)) for curve in curves.values()]
        rows.append([_count(size), *in_bytes, *shares])
    return _aligned(rows)


def _savings(analysis: Analysis) -> str:
    curves = curves_of(analysis.findings)
    period, factor = _period(analysis.findings)
    units = {"prefill_h": "h of prefill", "money": "money"}
    known = analysis.prices.saved(0.0)
    titles = [f"{name}: {units[unit]}" for name in curves for unit in known]
    rows = [[f"saved in a {period} by", *titles]]
    for size in analysis.sizes:
        row = [_count(size)]
        for curve in curves.values():
            saved = analysis.prices.saved(curve.share(size).value * curve.num_tokens * factor)
            row += [f"{value:,.2f}" for value in saved.values()]
        rows.append(row)
    return _aligned(rows)


def _fleets(analysis: Analysis) -> str:
    has_times = analysis.findings.span_s > 0
    waits = ["mean wait", "p95 wait"] if has_times else []
    rows = [["replicas", "cache each", "routing", "reused", "busiest / mean", *waits]]
    for setup, result in analysis.fleets:
        limit = "any size" if math.isinf(setup.cache_tokens) else _count(setup.cache_tokens)
        waited = [_duration(result.mean_wait_s), _duration(result.p95_wait_s)] if has_times else []
        reused = f"{_reused(result):.1%}"
        load = f"{result.busiest:.2f}"
        rows.append([str(setup.num_replicas), limit, setup.routing, reused, load, *waited])
    return _aligned(rows)


def plot(analysis: Analysis, path: Path) -> None:
    """Draw the curves into an SVG file that needs nothing else."""
    curves = curves_of(analysis.findings)
    most = max([curve.distinct_tokens for curve in curves.values()] + [1e3])
    series = []
    for number, (name, curve) in enumerate(curves.items()):
        sizes = [size for size in curve.sizes.tolist() if most / 1e4 <= size <= most * 1.1]
        shares = [100 * curve.share(size).value for size in sizes]
        css = "content" if name == "content" else f"prefix{number % len(PREFIX_COLOURS)}"
        points = tuple(zip(sizes, shares, strict=True))
        series.append(Line(f"{name}: {shares[-1]:.1f} %", css, points))
    tokens, reused = Scale("cache size in tokens", is_log=True), Scale("prompt tokens reused, %")
    drawn = lines(series, tokens, reused, "Reuse by cache size", over=(0, 100), has_dots=False)
    prefixes = {f"prefix{number}": pair for number, pair in enumerate(PREFIX_COLOURS)}
    path.write_text(standalone(drawn, prefixes | {"content": CONTENT_COLOUR}, 640))


def _num_tokens(findings: Findings) -> int:
    return round(max((curve.num_tokens for curve in findings.prefix.values()), default=0))


def _period(findings: Findings) -> tuple[str, float]:
    """The period that savings are given for, and its length in logs."""
    if findings.span_s < LEAST_SPAN_S:
        return "log", 1.0
    return "day", DAY_S / findings.span_s


def _reused(result: FleetResult) -> float:
    return (result.local_tokens + result.shared_tokens) / max(1.0, result.prompt_tokens)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _percent(share: Share) -> str:
    return f"{share.value:.1%}" + (f" ± {share.error:.1%}" if share.error else "")


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.0f}"


def _bytes(size_bytes: float) -> str:
    power = min(4, int(math.log10(max(size_bytes, 1)) // 3))
    return f"{size_bytes / 1e3**power:,.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s"
