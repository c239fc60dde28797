"""`kvboost serve`: the server, which is an extra."""

from __future__ import annotations

import argparse
import os

from kvboost.cli import flags
from kvboost.cli.loading import named
from kvboost.errors import KVBoostError
from kvboost.server.__main__ import HINT


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Serves a model with OpenAI's API. An option is taken from its flag, else from its "
        "variable, else from the file of --config.",
        "kvboost serve --model FOLDER",
        "kvboost serve --model FOLDER --reuse auto --disk-cache-dir kv-cache",
        "kvboost serve --config server.toml --host 0.0.0.0 --api-keys keys.toml",
    )
    parser.set_defaults(run=_serve)
    try:
        from kvboost.server.options import add_flags  # noqa: PLC0415

        add_flags(parser)
    except ImportError:
        parser.epilog = HINT


def _serve(options: argparse.Namespace) -> int:
    try:
        from kvboost.server.serve import run  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise KVBoostError(f"{HINT} ({error.name} is missing)") from error
    model = getattr(options, "model", None) or os.environ.get("KVBOOST_MODEL")
    with named(model or "of the configuration"):
        return run(options)
