"""The `kvboost` command: finds the command's own module and reports errors in a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvboost import __version__
from kvboost.cli import analyze, bench, cache, doctor, explain, keys, serve, top
from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kvboost", description="Language models that do not read again what they have read."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (serve, top, explain, cache, keys, bench, doctor, analyze):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (KVBoostError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"kvboost: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
