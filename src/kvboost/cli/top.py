"""`kvboost top`: what a server does now, in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvboost.cli.main import Commands

    Figures: TypeAlias = Mapping[str, Any]

TIMEOUT_S = 5.0
BAR_WIDTH = 30
COLOURS = {"exact": "green", "moved": "yellow", "miss": "bright_black"}


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
        hint = ": give a key with KVBOOST_API_KEY" if error.code in (401, 403) else ""
        raise KVBoostError(f"{url} answered {error.code} {error.reason}{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise KVBoostError(f"no server at {url} ({reason}); is `kvboost serve` running?") from error
    except ValueError as error:
        raise KVBoostError(f"{url} is not a KVBoost server: {error}") from error
    if not isinstance(stats, dict) or not {"engine", "batch", "requests"} <= stats.keys():
        raise KVBoostError(f"{url} is not a KVBoost server: its answer has no figures")
    return stats


def draw(stats: Figures, url: str, trouble: str = "") -> RenderableType:
    """The whole view."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    requests = stats["requests"]
    title = Text.assemble(
        ("kvboost ", "bold"), f"{url}  up {_age(requests['uptime_s'])}  ", (trouble, "bold red")
    )
    parts = [title, Text(), _load(stats["batch"], requests), Text(), _reuse(requests), Text()]
    parts += [_tiers(stats["engine"]), Text(), _errors(requests)]
    return Group(*parts)


def _load(batch: Figures, requests: Figures) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    minute = f"{requests['num_requests']} requests, {requests['num_errors']} errors since the start"
    table.add_row("requests", f"{requests['requests_per_s']:.1f}/s", minute)
    tokens = f"{requests['generated_tokens_per_s']:.0f}/s"
    prompt = f"and {requests['prompt_tokens_per_s']:.0f}/s of prompts"
    table.add_row("tokens", tokens, prompt)
    for name, count, limit in (
        ("running", batch["num_running"], batch["max_batch_size"]),
        ("waiting", batch["num_waiting"], batch["max_queue_size"]),
    ):
        table.add_row(name, f"{count} of {limit}", _bar(count, limit))
    for name, field in (("first token", "ttft_s"), ("next token", "itl_s"), ("queue", "queue_s")):
        times = requests[field]
        table.add_row(name, f"p50 {_duration(times['p50'])}", f"p95 {_duration(times['p95'])}")
    return table


def _reuse(requests: Figures) -> RenderableType:
    from rich.text import Text  # noqa: PLC0415

    tokens = requests["prompt_tokens"]
    total = sum(tokens[kind] for kind in COLOURS)
    line = Text("prompt tokens of the last minute  ")
    if not total:
        return line.append("none yet", "dim")
    shares = {kind: tokens[kind] / total for kind in COLOURS}
    for kind, colour in COLOURS.items():
        line.append("█" * round(shares[kind] * BAR_WIDTH), colour)
    for kind, colour in COLOURS.items():
        line.append(f"  {kind} {shares[kind]:.0%}", colour)
    return line.append(f"  ({tokens['repaired'] / total:.0%} repaired)", "dim")


def _tiers(engine: Figures) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    memory = {
        "is_up": True,
        "num_entries": engine["hot_chunks"],
        "size_bytes": engine["hot_memory_mb"] * 2**20,
        "budget_bytes": engine["budget_mb"] * 2**20,
        "hits": engine["cache_hits"],
        "misses": engine["cache_misses"],
    }
    columns = ("tier", "state", "filled", "", "chunks", "hits", "misses", "faults", "not written")
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, tier in {"memory": memory, **engine["tiers"]}.items():
        state = Text("up", "green") if tier["is_up"] else Text("DOWN", "bold red")
        counts = (tier.get(field, "") for field in ("hits", "misses", "faults", "dropped"))
        size, budget = tier["size_bytes"], tier["budget_bytes"]
        is_known = budget > 0  # a server that others fill too does not tell
        filled = f"{_size(size)} of {_size(budget)}" if is_known else "shared"
        bar = _bar(size, budget) if is_known else ""
        chunks = str(tier["num_entries"]) if is_known else ""
        table.add_row(name, state, bar, filled, chunks, *map(str, counts))
    return table


def _errors(requests: Figures) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    if not requests["recent_errors"]:
        return Text("no errors", "dim")
    table = Table("last errors", "", "", "", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for error in reversed(requests["recent_errors"]):
        at = time.strftime("%H:%M:%S", time.localtime(error["at"]))
        status = Text(f"{error['status']} {error['error']}", "red")
        table.add_row(at, status, Text(error["endpoint"]), Text(error["request_id"], "dim"))
    return table


def _bar(value: float, limit: float) -> RenderableType:
    from rich.progress_bar import ProgressBar  # noqa: PLC0415

    return ProgressBar(total=max(1, limit), completed=value, width=BAR_WIDTH)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GB"


def _age(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
