"""The tables of docs/concepts/scale.md, from the results of the `scale` benchmark."""

from __future__ import annotations

import re
from pathlib import Path

from kvboost.bench.records import Line as Row
from kvboost.bench.tables import table_of

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "scale.md"
TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
REPLICAS = 1_000
CACHE_TOKENS = 1.5e6  # of each replica


def write(results: Row) -> None:
    """Make the tables of the page anew."""
    PAGE.write_text(filled(PAGE.read_text(), results))


def filled(page: str, results: Row) -> str:
    """The page with its tables made from results."""
    return TABLE.sub(lambda found: _part(found[1], _table(found[1], results["rows"])), page)


def reused(course: list[Row]) -> list[float]:
    """Tokens reused in the minute from each step on, of 10 s each."""
    tokens = [step["prompt_tokens"] - step["computed_tokens"] for step in course]
    return [sum(tokens[step : step + 6]) for step in range(len(tokens) - 5)]


def _part(name: str, table: str) -> str:
    return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end of table -->"


COLUMNS = {
    "models": (
        "model",
        "model | bytes/token | 1.5 M tokens | GPUs | prefill tokens/s | GB/s",
        "{model} | {bytes_per_token:,} | {held_gb:,.0f} GB | {gpus} | {prefill_tokens_per_s:,.0f}"
        " | {break_even_gb_per_s:.1f}",
    ),
    "routers": (
        "router",
        "replicas | bytes/anchor | 2^20 anchors | time for a request | requests/s",
        "{replicas:,} | {bytes_per_anchor:.0f} | {book_mb:.0f} MB | {route_ms:.1f} ms"
        " | {rate:,.0f}",
    ),
    "reports": (
        "report",
        "replicas | to the controller, MB/s | to each router, MB/s",
        "{replicas:,} | {in_mb:,.1f} | {out_mb:,.0f}",
    ),
    "sizes": (
        "size",
        "replicas | tier | routing | own cache, % | tier, % | p50, s | p95, s",
        "{replicas:,} | {with_tier} | {routing} | {local_pc:.1f} | {shared_pc:.1f} | {p50_s:.2f}"
        " | {p95_s:.2f}",
    ),
    "sampling": (
        "sampling",
        "routing | sample | reused, % | error, points | p95, s | error",
        "{routing} | {sampled:g} | {reused:.1f} | {points:+.1f} | {p95_s:.2f} | {error:+.0f} %",
    ),
    "stale": (
        "stale",
        "routers | reports | reused, % | p95, s",
        "{routers} | {reports} | {local_pc:.1f} | {p95_s:.2f}",
    ),
    "memory": (
        "memory",
        "remembered / held | reused, % | p95, s",
        "{remembered:g} | {local_pc:.1f} | {p95_s:.2f}",
    ),
    "slack": (
        "slack",
        "routing | reused, % | mean, s | p50, s | p95, s",
        "{name} | {local_pc:.1f} | {mean_s:.2f} | {p50_s:.2f} | {p95_s:.2f}",
    ),
    "popular": (
        "popular",
        "routing | reused, % | busiest / mean | p95, s",
        "{routing} | {local_pc:.1f} | {busiest:.1f} | {p95_s:,.1f}",
    ),
    "failures": (
        "failure",
        "lost | tier | reused, worst minute | within 5 % after | p95, worst 10 s",
        "{lost} of {replicas} | {with_tier} | {less:+.0f} % | {recovered_s:.0f} s | {most_p95:.1f}",
    ),
}
"""What rows a table has; the titles of its columns, and the formats of its cells."""
TABLES = (*COLUMNS, "network")


def _shown(row: Row, rows: list[Row]) -> Row:
    """What a row's table shows that it does not have itself: shares in percent, words, sums."""
    shown = {f"{each}_pc": 100 * row[each] for each in ("local", "shared") if each in row}
    shown["with_tier"] = "yes" if row.get("tier") else "no"
    match row["what"]:
        case "model":
            shown["held_gb"] = CACHE_TOKENS * row["bytes_per_token"] / 1e9
        case "router":
            shown["book_mb"] = row["bytes_per_anchor"] * 2**20 / 1e6
            shown |= {"route_ms": 1e3 * row["route_s"], "rate": 1 / row["route_s"]}
        case "report":
            shown |= {"in_mb": row["to_controller"] / 1e6, "out_mb": row["to_router"] / 1e6}
        case "sampling":
            whole = next(r for r in rows if (r["routing"], r["sampled"]) == (row["routing"], 1.0))
            shown["reused"] = 100 * (1 - row["computed"])
            shown["points"] = 100 * (whole["computed"] - row["computed"])
            shown["error"] = 100 * (row["p95_s"] / whole["p95_s"] - 1)
        case "stale":
            every_s = row["report_every_s"]
            shown["reports"] = f"every {every_s:g} s" if every_s else "never"
        case "slack":
            slack = row["slack"]
            shown["name"] = "least-loaded" if slack is None else f"reuse, slack {slack}"
        case "failure":
            shown["less"] = 100 * (row["least_reused"] - 1)
    return row | shown


def _table(name: str, rows: list[Row]) -> str:
    if name == "network":
        return _network(rows)
    what, head, line = COLUMNS[name]
    own = [row for row in rows if row["what"] == what]
    if what == "size":
        shown = [row for row in own if row["replicas"] in (4, 64, REPLICAS)]
    else:
        shown = [row for row in own if row.get("lost", True)]
    return table_of(head, line, [_shown(row, own) for row in shown])


def _network(rows: list[Row]) -> str:
    """What a shared tier's network carries."""
    head, line = "model", "{model}"
    models = [dict(row) for row in rows if row["what"] == "model"]
    for size in rows:
        name = size.get("routing")
        if size["what"] != "size" or size["replicas"] != REPLICAS or not size["tier"]:
            continue
        if name not in ("two-choices", "reuse"):
            continue
        head += f" | {name}: read + written by a replica, GB/s | {REPLICAS:,} replicas, GB/s"
        line += f" | {{{name}[0]:.2f}} + {{{name}[1]:.2f}} | {{{name}[2]:,.0f}}"
        for row in models:
            read, written = (
                size[f"{way}_tokens_per_s"] * row["bytes_per_token"] / 1e9
                for way in ("loaded", "computed")
            )
            row[name] = read, written, REPLICAS * (read + written)
    return table_of(head, line, models)
