"""`kvboost analyze`: what reuse would save, told from a log of requests."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.analyze.curve import follow
from kvboost.analyze.fleet import ROUTINGS, FleetResult, Setup, simulate
from kvboost.analyze.logs import BYTES_PER_TOKEN, LoggedRequest, read
from kvboost.analyze.report import (
    Analysis,
    Prices,
    as_json,
    as_text,
    kv_bytes_of,
    plot,
    sizes_to_show,
)
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.cli.main import Commands

MOST_TOLD = 3  # of broken lines
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    analyze = commands.add_parser(
        "analyze",
        help="what reuse would save, told from a log of requests; no model, no GPU",
        description="Reads a log of requests and tells what part of the prompts would be reused, "
        "by cache size. A line is a request: one of a hash trace in Mooncake's format, or the body "
        "of a request to an OpenAI server. Numbers of tokens may end in K, M or G.",
    )
    analyze.set_defaults(run=_analyze)
    add = analyze.add_argument
    add("log", nargs="?", default="-", help="JSON lines, also gzipped (default: standard input)")
    add(
        "--cache-tokens",
        type=_number_of_tokens,
        nargs="+",
        default=[],
        help="sizes of caches to tell of",
    )
    add(
        "--block-tokens",
        type=int,
        nargs="+",
        default=[],
        help="tokens in a block of prefix reuse (default: 128, and 512 for hash traces)",
    )
    add(
        "--bytes-per-token",
        type=_positive_number,
        default=BYTES_PER_TOKEN,
        help="of texts (default: 4)",
    )
    sizes = analyze.add_mutually_exclusive_group()
    sizes.add_argument(
        "--bytes-per-kv-token", type=_positive_number, help="bytes of K/V of one token"
    )
    sizes.add_argument("--model-config", type=Path, help="a model's config.json, to compute them")
    add(
        "--prefill-speed",
        type=_positive_number,
        help="prompt tokens a second, to tell the time saved",
    )
    add(
        "--price", type=_positive_number, help="of a million prompt tokens, to tell the money saved"
    )
    add("--replicas", type=int, nargs="+", default=[], help="simulate fleets of so many replicas")
    add("--routing", nargs="+", choices=ROUTINGS, default=["reuse"], help="how fleets route")
    add(
        "--replica-cache-tokens",
        type=_number_of_tokens,
        default=math.inf,
        help="size of each replica's cache (default: any)",
    )
    add(
        "--shared-tokens",
        type=_number_of_tokens,
        default=0.0,
        help="size of a tier that replicas share",
    )
    add("--plot", type=Path, metavar="FILE.svg", help="draw reuse by cache size")
    add("--json", action="store_true", help="print JSON")


def _analyze(options: argparse.Namespace) -> int:
    _check(options)
    kv_bytes = options.bytes_per_kv_token
    if options.model_config:
        kv_bytes = kv_bytes_of(options.model_config)
    broken: list[int] = []

    def skip(number: int, reason: str) -> None:
        broken.append(number)
        if len(broken) <= MOST_TOLD:
            sys.stderr.write(f"kvboost: line {number} is left out: {reason}\n")

    findings = follow(_read(options, skip), options.block_tokens, options.cache_tokens)
    if not findings.num_requests:
        raise ConfigError("the log has no requests")
    analysis = Analysis(
        findings=findings,
        sizes=sorted(options.cache_tokens) or sizes_to_show(findings),
        prices=Prices(kv_bytes, options.prefill_speed, options.price),
        num_skipped=len(broken),
        fleets=list(_fleets(options)),
    )
    if len(broken) > MOST_TOLD:
        sys.stderr.write(f"kvboost: {len(broken)} lines are left out\n")
    if options.plot:
        plot(analysis, options.plot)
    if options.json:
        sys.stdout.write(json.dumps(as_json(analysis), indent=2) + "\n")
    else:
        sys.stdout.write(as_text(analysis))
    return 0


def _check(options: argparse.Namespace) -> None:
    if min([1, *options.block_tokens]) < 1:
        raise ConfigError("--block-tokens: expected numbers above 0")
    if min([1, *options.replicas]) < 1:
        raise ConfigError("--replicas: expected numbers above 0")
    if options.replicas and options.log == "-":
        raise ConfigError("--replicas reads the log once for each fleet: give a file")


def _read(
    options: argparse.Namespace, skip: Callable[[int, str], None] = lambda number, reason: None
) -> Iterator[LoggedRequest]:
    return read(
        None if options.log == "-" else Path(options.log),
        block_tokens=math.gcd(*options.block_tokens) or None,
        bytes_per_token=options.bytes_per_token,
        on_broken=skip,
    )


def _fleets(options: argparse.Namespace) -> Iterator[tuple[Setup, FleetResult]]:
    for num_replicas in options.replicas:
        for routing in options.routing:
            setup = Setup(
                num_replicas=num_replicas,
                routing=routing,
                cache_tokens=options.replica_cache_tokens,
                shared_tokens=options.shared_tokens,
            )
            if options.prefill_speed:
                setup = replace(setup, prefill_tokens_per_s=options.prefill_speed)
            yield setup, simulate(_read(options), setup)


def _positive_number(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def _number_of_tokens(text: str) -> float:
    unit = UNITS.get(text[-1:].upper(), 1.0)
    return _positive_number(text[:-1] if unit > 1 else text) * unit
