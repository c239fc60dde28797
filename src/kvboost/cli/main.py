"""The `kvboost` command: loads the module of the command that runs, and no other.

A command's module has `describe(parser)`, which adds its flags and sets `run`.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvboost import __version__
from kvboost.config import choose_wait_policy, hint
from kvboost.errors import KVBoostError

COMMANDS = {
    "serve": "serve a model with OpenAI's API",
    "generate": "answer a prompt",
    "chat": "talk with a model in the terminal",
    "warm": "prefill texts into a disk folder or a shared store before they are needed",
    "explain": "show which spans of a prompt are reused, and why",
    "verify": "check that reuse does not change a model's answers",
    "doctor": "certify a model, measure it on this machine, and recommend settings",
    "bench": "compare speed and quality with other systems, and write a report",
    "analyze": "estimate from a request log what reuse would save; no model, no GPU",
    "probe": "check the cache of any OpenAI-compatible server; no model, no GPU",
    "cache": "inspect, check and clean the folder of a disk tier",
    "top": "watch a running server: requests, reuse, latencies, tiers, errors",
    "keys": "create API keys for `kvboost serve`",
    "completion": "print a shell completion script",
}
INTERRUPTED = 130
EPILOG = """\
`kvboost COMMAND --help` shows flags and examples.

exit codes:
  0    done
  1    failed, or the verdict of a check is negative
  2    wrong usage: an argument is missing, unknown or out of range
  130  interrupted with Ctrl+C (chat, serve and top: 0)
"""


class Parser(argparse.ArgumentParser):
    """Keeps line breaks of descriptions and examples; commands have parsers of this class too."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **arguments
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does; an unknown argument is reported with the usage of its command."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            near = hint(unknown[0].partition("=")[0], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return options, unknown


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; with `only`, the others are names without flags."""
    parser = Parser(
        prog="kvboost",
        description="KV-cache reuse for Transformers: prefill shared text once, then reuse it.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True
    )
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if only in (None, name):
            import_module(f"kvboost.cli.{name}").describe(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    name = given[0]
    parser = make_parser(only=name)
    if name not in COMMANDS and not name.startswith("-"):
        known = hint(name, COMMANDS) or f": there are {', '.join(COMMANDS)}"
        parser.error(f"no command {name!r}{known}")
    options = parser.parse_args(given)
    choose_wait_policy()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows what it can
    try:
        code: int = options.run(options)
    except (KVBoostError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"kvboost: {_told(error)}\n")
        return 1
    except (KeyboardInterrupt, EOFError):
        return INTERRUPTED
    return code


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
