"""The view of `kvboost top`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvboost.core import percent

Figures: TypeAlias = Mapping[str, Any]

WIDTH = 40  # of the bars; all of it fits into 80 columns
COLOURS = {"exact": "green", "moved": "yellow", "miss": "bright_black"}


def draw(stats: Figures, url: str, trouble: str = "") -> RenderableType:
    """The whole view; `trouble` says why the figures are out of date."""
    requests = stats["requests"]
    title = Text.assemble(("kvboost", "bold"), f"  {url}  up {_age(requests['uptime_s'])}")
    return Group(
        title,
        Text(trouble, "bold red"),
        _load(stats["batch"], requests),
        Text(),
        _tiers(stats["engine"]),
        Text(),
        _errors(requests),
    )


def _load(batch: Figures, requests: Figures) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    since = f"{requests['num_requests']} since the start, {requests['num_errors']} with errors"
    table.add_row("requests", f"{requests['requests_per_s']:.1f}/s", since)
    table.add_row("answers", f"{requests['generated_tokens_per_s']:.0f} tokens/s")
    bar, shares = _reuse(requests["prompt_tokens"])
    table.add_row("prompts", f"{requests['prompt_tokens_per_s']:.0f} tokens/s", bar)
    table.add_row("", "", shares)
    for name, count, limit in (
        ("running", batch["num_running"], batch["max_batch_size"]),
        ("waiting", batch["num_waiting"], batch["max_queue_size"]),
    ):
        table.add_row(name, f"{count} of {limit}", _bar(count, limit, WIDTH))
    for name, field in (("first token", "ttft_s"), ("next token", "itl_s"), ("queue", "queue_s")):
        times = requests[field]
        table.add_row(name, f"p50 {_duration(times['p50'])}", f"p95 {_duration(times['p95'])}")
    return table


def _reuse(tokens: Figures) -> tuple[Text, Text]:
    """A bar of exact, moved and missed prompt tokens, and the same in words."""
    total = sum(tokens[kind] for kind in COLOURS)
    if not total:
        return Text("none in the last minute", "dim"), Text()
    bar, words = Text(), Text()
    for kind, colour in COLOURS.items():
        share = tokens[kind] / total
        bar.append("█" * round(share * WIDTH), colour)
        words.append(f"{kind} {percent(tokens[kind], total)}  ", colour)
    return bar, words.append(f"repaired {percent(tokens['repaired'], total)}", "dim")


def _tiers(engine: Figures) -> RenderableType:
    memory = {
        "is_up": True,
        "num_entries": engine["hot_chunks"],
        "size_bytes": engine["hot_memory_mb"] * 2**20,
        "budget_bytes": engine["budget_mb"] * 2**20,
        "hits": engine["cache_hits"],
        "misses": engine["cache_misses"],
    }
    columns = ("tier", "state", "filled", "", "chunks", "hits", "misses", "faults", "dropped")
    table = Table(*columns, box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name, tier in {"memory": memory, **engine["tiers"]}.items():
        state = Text("up", "green") if tier["is_up"] else Text("DOWN", "bold red")
        counts = (tier.get(field, "") for field in ("hits", "misses", "faults", "dropped"))
        size, budget = tier["size_bytes"], tier["budget_bytes"]
        is_known = budget > 0  # a server that others fill too does not tell
        filled = f"{_size(size)} / {_size(budget)}" if is_known else "shared"
        bar = _bar(size, budget, WIDTH // 4) if is_known else ""
        chunks = str(tier["num_entries"]) if is_known else ""
        table.add_row(name, state, bar, filled, chunks, *map(str, counts))
    return table


def _errors(requests: Figures) -> RenderableType:
    if not requests["recent_errors"]:
        return Text("no errors", "dim")
    table = Table("last errors", "", "", "", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for error in reversed(requests["recent_errors"]):
        at = time.strftime("%H:%M:%S", time.localtime(error["at"]))
        status = _plain(f"{error['status']} {error['error']}", "red")
        table.add_row(at, status, _plain(error["endpoint"]), _plain(error["request_id"], "dim"))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Text from outside, which must not steer the terminal."""
    return Text(text if text.isprintable() else ascii(text), style)


def _bar(value: float, limit: float, width: int) -> RenderableType:
    return ProgressBar(max(1, limit), value, width=width, complete_style="cyan")


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
