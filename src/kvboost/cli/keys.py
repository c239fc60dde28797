"""`kvboost keys`: creates API keys for the server."""

from __future__ import annotations

import argparse
import json
import sys

from kvboost.cli import flags
from kvboost.errors import KVBoostError
from kvboost.server.__main__ import HINT


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their flags."""
    examples = (
        "kvboost keys new --tenant research --name alice >> keys.toml",
        "kvboost keys new --tenant ops --admin --json",
    )
    flags.about(parser, "Creates API keys for `kvboost serve --api-keys keys.toml`.", *examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="create a key and its entry for the key file")
    flags.about(
        new,
        "Prints a new key once, on standard error, and its entry for the key file on standard "
        "output: append that with >> keys.toml. The entry has a hash of the key, not the key.",
        *examples,
    )
    new.add_argument(
        "--tenant",
        required=True,
        metavar="NAME",
        help="tenant of the key: keys of one tenant share a cache",
    )
    new.add_argument("--name", default="", metavar="NAME", help="a note for yourself")
    new.add_argument(
        "--admin", action="store_true", help="allow metrics, statistics and changes of the cache"
    )
    flags.add_json(new, "print key and entry as JSON on standard output")
    new.set_defaults(run=_new)


def _new(options: argparse.Namespace) -> int:
    try:
        from kvboost.server.keys import new_key  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise KVBoostError(HINT) from error
    key, entry = new_key(options.tenant, options.name, is_admin=options.admin)
    if options.json:
        sys.stdout.write(json.dumps({"key": key, "entry": entry}) + "\n")
    else:
        sys.stderr.write(f"{key}\n")
        sys.stdout.write(entry)
    return 0
