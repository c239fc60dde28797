"""`kvboost keys`: makes API keys for the server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost.cli.main import Commands


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    keys = commands.add_parser("keys", help="make API keys for `kvboost serve`")
    actions = keys.add_subparsers(dest="action", required=True)
    text = "prints a fresh key once, on standard error, and its entry for the key file on output"
    new = actions.add_parser("new", help=text, description=f"{text}: append it with >> keys.toml")
    new.add_argument("--tenant", required=True, help="whose cache it uses")
    new.add_argument("--name", default="", help="shown to nobody but you")
    new.add_argument("--admin", action="store_true", help="may see metrics and change the cache")
    new.set_defaults(run=_new)


def _new(options: argparse.Namespace) -> int:
    try:
        from kvboost.server.keys import new_key  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise KVBoostError("keys are of the server: `pip install 'kvboost[server]'`") from error
    key, entry = new_key(options.tenant, options.name, is_admin=options.admin)
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(entry)
    return 0
