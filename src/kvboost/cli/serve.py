"""`kvboost serve`: the server, which is an extra."""

from __future__ import annotations

import argparse

from kvboost.cli import flags
from kvboost.errors import KVBoostError
from kvboost.server.__main__ import HINT
from kvboost.server.options import ABOUT, add_flags


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        ABOUT,
        "kvboost serve --model FOLDER",
        "kvboost serve --model FOLDER --reuse auto --disk-cache-dir kv-cache",
        "kvboost serve --config server.toml --host 0.0.0.0 --api-keys keys.toml",
    )
    parser.set_defaults(run=_serve)
    add_flags(parser)


def _serve(options: argparse.Namespace) -> int:
    try:
        from kvboost.server.serve import run  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise KVBoostError(f"{HINT} ({error.name} is missing)") from error
    return run(options)
