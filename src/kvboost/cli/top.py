"""`kvboost top`: what a server does now, in the terminal."""

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
from kvboost.errors import KVBoostError, missing_extra

TIMEOUT_S = 5.0


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Watches a running server. Ctrl+C ends it.",
        "kvboost top",
        "kvboost top --url http://127.0.0.1:8000 --json",
    )
    parser.set_defaults(run=_top)
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="where the server is (default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("KVBOOST_API_KEY", ""),
        metavar="KEY",
        help="key of the server; better given as KVBOOST_API_KEY, which others cannot see",
    )
    parser.add_argument(
        "--interval-s",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between looks (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="look once, print, and end")
    flags.add_json(parser, "look once, and print what the server says as JSON")


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
        raise KVBoostError(f"{missing_extra('this', 'cli')}; or use --json") from error
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
    """What a server says of itself.

    Raises:
        KVBoostError: it cannot be reached, refuses, or is something else; the message says which.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            stats = json.load(reply)
    except urllib.error.HTTPError as error:
        needs_key = error.code in (401, 403)
        hint = ": give an administrator's key with KVBOOST_API_KEY" if needs_key else ""
        raise KVBoostError(f"{url} answered {error.code} {error.reason}{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise KVBoostError(f"no server at {url} ({reason}); is `kvboost serve` running?") from error
    except ValueError as error:
        raise KVBoostError(f"{url} is not a KVBoost server: {error}") from error
    if not isinstance(stats, dict) or not {"engine", "batch", "requests"} <= stats.keys():
        raise KVBoostError(f"{url} is not a KVBoost server: its answer has no figures")
    return stats
