"""`kvboost top`: what a server does now, in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost.cli.main import Commands

TIMEOUT_S = 5.0


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    top = commands.add_parser(
        "top",
        help="watch a running server: requests, tokens, reuse, latencies, tiers, errors",
        description="Watches a running server. Ctrl+C ends it.",
    )
    top.set_defaults(run=_top)
    top.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where the server is (default: http://127.0.0.1:8000)",
    )
    top.add_argument(
        "--api-key",
        default=os.environ.get("KVBOOST_API_KEY", ""),
        help="key of the server; better given as KVBOOST_API_KEY, which others cannot see",
    )
    top.add_argument(
        "--interval-s", type=float, default=1.0, help="seconds between looks (default: 1)"
    )
    top.add_argument("--once", action="store_true", help="look once, print, and end")


def _top(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        from kvboost.cli.screen import draw  # noqa: PLC0415
    except ImportError as error:
        raise KVBoostError("this needs `pip install 'kvboost[cli]'`") from error
    url = options.url.rstrip("/") + "/v1/stats"
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
