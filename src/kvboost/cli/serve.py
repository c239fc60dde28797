"""`kvboost serve`: the server, which is an extra; `kvboost keys`: its API keys."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvboost.errors import KVBoostError
from kvboost.server.__main__ import HINT

if TYPE_CHECKING:
    from kvboost.cli.main import Commands


def add_parser(commands: Commands) -> None:
    """Describe the commands."""
    serve = commands.add_parser(
        "serve",
        help="serve a model with OpenAI's API",
        description="Serves a model with OpenAI's API. An option is taken from its flag, else from "
        "its variable, else from the file of --config.",
        allow_abbrev=False,
    )
    serve.set_defaults(run=_serve)
    try:
        from kvboost.server.options import add_flags  # noqa: PLC0415

        add_flags(serve)
    except ImportError:
        serve.epilog = HINT


def _serve(options: argparse.Namespace) -> int:
    try:
        from kvboost.server.serve import run  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise KVBoostError(f"{HINT} ({error.name} is missing)") from error
    return run(options)
