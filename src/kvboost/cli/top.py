"""`kvboost top`: watches a running server in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from kvboost.cli import flags
from kvboost.config import key_header
from kvboost.errors import KVBoostError, missing_packages

TIMEOUT_S = 5.0


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Watches a running server until Ctrl+C.",
        "kvboost top",
        "kvboost top --url http://127.0.0.1:8000 --json",
    )
    parser.set_defaults(run=_top)
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the server (default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("KVBOOST_API_KEY", ""),
        metavar="KEY",
        help="an administrator's API key; safer as KVBOOST_API_KEY: other users can see flags",
    )
    parser.add_argument(
        "--interval-s",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between updates (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print once and exit")
    flags.add_json(parser, "print the server's figures once, as JSON")


def _top(options: argparse.Namespace) -> int:
    url = options.url.rstrip("/") + "/v1/stats"
    if options.json:
        sys.stdout.write(json.dumps(fetch(url, options.api_key), indent=2) + "\n")
        return 0
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        from kvboost.cli.screen import draw  # noqa: PLC0415
    except ImportError as error:
        raise KVBoostError(f"{missing_packages('top', 'rich')}; or use --json") from error
    stats = fetch(url, options.api_key)
    if options.once:
        Console().print(draw(stats, options.url))
        return 0
    with Live(draw(stats, options.url), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(max(0.1, options.interval_s))
                trouble = ""
                try:
                    stats = fetch(url, options.api_key)
                except KVBoostError as error:
                    trouble = str(error)
                live.update(draw(stats, options.url, trouble), refresh=True)
        except KeyboardInterrupt:
            return 0


def fetch(url: str, api_key: str) -> dict[str, Any]:
    """The figures of a server.

    Raises:
        KVBoostError: it cannot be reached, refuses, or is not a KVBoost server.
    """
    headers = key_header(api_key)
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            stats = json.load(reply)
    except urllib.error.HTTPError as error:
        needs_key = error.code in (401, 403)
        hint = ": set KVBOOST_API_KEY to an administrator's key" if needs_key else ""
        raise KVBoostError(f"{url} answered {error.code} {error.reason}{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise KVBoostError(f"no server at {url} ({reason}); is `kvboost serve` running?") from error
    except ValueError as error:
        raise KVBoostError(f"{url} is not a KVBoost server: {error}") from error
    if not isinstance(stats, dict) or not {"engine", "batch", "requests"} <= stats.keys():
        raise KVBoostError(f"{url} is not a KVBoost server: its reply has no figures")
    return stats
