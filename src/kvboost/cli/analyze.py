"""`kvboost analyze`: what reuse would save, from a log of requests."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.analyze.choices import BYTES_PER_TOKEN, ROUTINGS
from kvboost.cli import flags
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.analyze.fleet import FleetResult, Setup
    from kvboost.analyze.logs import LoggedRequest

MOST_TOLD = 3  # of broken lines
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Estimates from a request log which share of prompt tokens would be reused, by cache size. "
        "Each line is a request: a hash trace in Mooncake's format, or the body of a request to "
        "an OpenAI server. Token counts may end in K, M or G.",
        "kvboost analyze requests.jsonl",
        "kvboost analyze requests.jsonl --price 0.5 --prefill-speed 4000 --plot reuse.svg",
        "kvboost analyze trace.jsonl --replicas 1 4 16 --routing reuse least-loaded "
        "--shared-tokens 10M",
    )
    parser.set_defaults(run=_analyze)
    _add_reading(parser)
    _add_worth(parser)
    _add_fleets(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="plot reuse by cache size")
    flags.add_json(parser)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Flags for reading and counting."""
    add = parser.add_argument
    add(
        "log",
        nargs="?",
        default="-",
        metavar="LOG",
        help="JSON lines, also gzipped (default: standard input)",
    )
    add(
        "--cache-tokens",
        type=_number_of_tokens,
        nargs="+",
        default=[],
        metavar="N",
        help="cache sizes to report (default: round numbers from 1K)",
    )
    add(
        "--block-tokens",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="block size of prefix reuse, in tokens (default: 128; hash traces: 512)",
    )
    add(
        "--bytes-per-token",
        type=_positive_number,
        default=BYTES_PER_TOKEN,
        metavar="N",
        help="bytes of text per token (default: 4)",
    )


def _add_worth(parser: argparse.ArgumentParser) -> None:
    """Flags for what saved tokens are worth."""
    add = parser.add_argument
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--bytes-per-kv-token",
        type=_positive_number,
        metavar="N",
        help="K/V bytes per token",
    )
    sizes.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="config.json of a model, to compute them from",
    )
    add(
        "--prefill-speed",
        type=_positive_number,
        metavar="N",
        help="prompt tokens per second, to estimate time saved",
    )
    add(
        "--price",
        type=_positive_number,
        metavar="MONEY",
        help="price of a million prompt tokens, to estimate money saved",
    )


def _add_fleets(parser: argparse.ArgumentParser) -> None:
    """Flags for fleets to simulate."""
    add = parser.add_argument
    add(
        "--replicas",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="simulate fleets with these numbers of replicas",
    )
    add(
        "--routing",
        nargs="+",
        choices=ROUTINGS,
        default=["reuse"],
        help="routing policies to simulate (default: reuse)",
    )
    add(
        "--replica-cache-tokens",
        type=_number_of_tokens,
        default=math.inf,
        metavar="N",
        help="cache size of each replica (default: unlimited)",
    )
    add(
        "--shared-tokens",
        type=_number_of_tokens,
        default=0.0,
        metavar="N",
        help="size of a tier shared by the replicas",
    )


def _analyze(options: argparse.Namespace) -> int:
    from kvboost.analyze.curve import follow  # noqa: PLC0415  (loads numpy)
    from kvboost.analyze.report import (  # noqa: PLC0415
        Analysis,
        Prices,
        as_json,
        as_text,
        kv_bytes_of,
        plot,
        sizes_to_show,
    )

    _check(options)
    kv_bytes = options.bytes_per_kv_token
    if options.model_config:
        kv_bytes = kv_bytes_of(options.model_config)
    broken: list[int] = []

    def skip(number: int, reason: str) -> None:
        broken.append(number)
        if len(broken) <= MOST_TOLD:
            sys.stderr.write(f"kvboost: skipping line {number}: {reason}\n")

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
        sys.stderr.write(f"kvboost: {len(broken)} lines skipped\n")
    if options.json:
        sys.stdout.write(json.dumps(as_json(analysis), indent=2) + "\n")
    else:
        sys.stdout.write(as_text(analysis))
    sys.stdout.flush()
    if options.plot:
        plot(analysis, options.plot)
    return 0


def _check(options: argparse.Namespace) -> None:
    if min([1, *options.block_tokens]) < 1:
        options.fail("--block-tokens: expected numbers above 0")
    if min([1, *options.replicas]) < 1:
        options.fail("--replicas: expected numbers above 0")
    if options.replicas and options.log == "-":
        options.fail("--replicas reads the log once for each fleet: pass a file")


def _read(
    options: argparse.Namespace, skip: Callable[[int, str], None] = lambda number, reason: None
) -> Iterator[LoggedRequest]:
    from kvboost.analyze.logs import read  # noqa: PLC0415

    return read(
        None if options.log == "-" else Path(options.log),
        block_tokens=math.gcd(*options.block_tokens) or None,
        bytes_per_token=options.bytes_per_token,
        on_broken=skip,
    )


def _fleets(options: argparse.Namespace) -> Iterator[tuple[Setup, FleetResult]]:
    from kvboost.analyze.fleet import Setup, simulate  # noqa: PLC0415

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
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _number_of_tokens(text: str) -> float:
    unit = UNITS.get(text[-1:].upper(), 1.0)
    return _positive_number(text[:-1] if unit > 1 else text) * unit
