"""`kvboost completion`: a script for the user's shell."""

from __future__ import annotations

import argparse
import sys

from kvboost.cli import flags
from kvboost.errors import KVBoostError, missing_packages

SHELLS = ("bash", "zsh", "tcsh")


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Prints a script that completes commands, flags and their values. Needs shtab.",
        "kvboost completion bash > ~/.local/share/bash-completion/completions/kvboost",
        "kvboost completion zsh > ~/.zfunc/_kvboost     # a folder of $fpath",
    )
    parser.set_defaults(run=_completion)
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise KVBoostError(missing_packages("completion", "shtab")) from error
    from kvboost.cli.main import make_parser  # noqa: PLC0415  (it loads this module)

    sys.stdout.write(shtab.complete(make_parser(), options.shell) + "\n")
    return 0
