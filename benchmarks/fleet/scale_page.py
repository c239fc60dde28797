"""The tables of docs/concepts/scale.md, from the results of the `scale` benchmark."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvboost.bench.records import Line as Row

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "scale.md"
TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
REPLICAS = 1_000


def write(results: Row) -> None:
    """Make the tables of the page anew."""
    PAGE.write_text(filled(PAGE.read_text(), results))


def filled(page: str, results: Row) -> str:
    """The page with its tables made from results."""
    return TABLE.sub(lambda found: _part(found[1], TABLES[found[1]](results)), page)


def _part(name: str, table: str) -> str:
    return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end of table -->"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(results: Row, what: str, **wanted: object) -> list[Row]:
    return [
        row
        for row in results["rows"]
        if row["what"] == what and all(row[key] == value for key, value in wanted.items())
    ]


def models(results: Row) -> str:
    """Bytes and break-even bandwidth of models."""
    tokens = results["assumed"]["cache_tokens"]
    rows = [
        [
            row["model"],
            f"{row['bytes_per_token']:,}",
            f"{tokens * row['bytes_per_token'] / 1e9:,.0f} GB",
            str(row["gpus"]),
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['break_even_gb_per_s']:.1f}",
        ]
        for row in _rows(results, "model")
    ]
    held = f"{tokens / 1e6:g} M tokens"
    return _table(["model", "bytes/token", held, "GPUs", "prefill tokens/s", "GB/s"], rows)


def routers(results: Row) -> str:
    """What a router weighs and needs."""
    rows = [
        [
            f"{row['replicas']:,}",
            f"{row['bytes_per_place']:.0f}",
            f"{row['bytes_per_place'] * 2**20 / 1e6:.0f} MB",
            f"{1e3 * row['route_s']:.1f} ms",
            f"{1 / row['route_s']:,.0f}",
        ]
        for row in _rows(results, "router")
    ]
    head = ["replicas", "bytes/place", "2^20 places", "time for a request", "requests/s"]
    return _table(head, rows)


def index(results: Row) -> str:
    """What an index weighs."""
    rows = [[f"{row['chunks']:,}", f"{row['bytes']:.0f}"] for row in _rows(results, "index")]
    return _table(["chunks", "bytes/chunk"], rows)


def reports(results: Row) -> str:
    """Traffic of full reports through Ray Serve's controller."""
    rows = [
        [
            f"{row['replicas']:,}",
            f"{row['to_controller'] / 1e6:,.1f}",
            f"{row['to_router'] / 1e6:,.0f}",
        ]
        for row in _rows(results, "report")
    ]
    return _table(["replicas", "to the controller, MB/s", "to each router, MB/s"], rows)


def sizes(results: Row) -> str:
    """Reuse and waits of all routings, by size."""
    rows = [
        [
            f"{row['replicas']:,}",
            "yes" if row["tier"] else "no",
            row["routing"],
            f"{100 * row['local']:.1f}",
            f"{100 * row['shared']:.1f}",
            f"{row['p50_s']:.2f}",
            f"{row['p95_s']:.2f}",
        ]
        for row in _rows(results, "size")
        if row["replicas"] in (4, 64, REPLICAS)
    ]
    head = ["replicas", "tier", "routing", "own cache, %", "tier, %", "p50, s", "p95, s"]
    return _table(head, rows)


def sampling(results: Row) -> str:
    """What sampling changes."""
    rows = []
    for row in _rows(results, "sampling"):
        whole = _rows(results, "sampling", routing=row["routing"], sampled=1.0)[0]
        cells = [row["routing"], f"{row['sampled']:g}", f"{100 * (1 - row['computed']):.1f}"]
        cells.append(f"{100 * (whole['computed'] - row['computed']):+.1f}")
        cells += [f"{row['p95_s']:.2f}", f"{100 * (row['p95_s'] / whole['p95_s'] - 1):+.0f} %"]
        rows.append(cells)
    return _table(["routing", "sample", "reused, %", "error, points", "p95, s", "error"], rows)


def stale(results: Row) -> str:
    """Reports and routers."""
    rows = [
        [
            str(row["routers"]),
            f"every {row['report_every_s']:g} s" if row["report_every_s"] else "never",
            f"{100 * row['local']:.1f}",
            f"{row['p95_s']:.2f}",
        ]
        for row in _rows(results, "stale")
    ]
    return _table(["routers", "reports", "reused, %", "p95, s"], rows)


def memory(results: Row) -> str:
    """Routers that remember less than all."""
    rows = [
        [f"{row['remembered']:g}", f"{100 * row['local']:.1f}", f"{row['p95_s']:.2f}"]
        for row in _rows(results, "memory")
    ]
    return _table(["remembered / held", "reused, %", "p95, s"], rows)


def slack(results: Row) -> str:
    """Queues against reuse."""
    rows = [
        [
            "least-loaded" if row["slack"] is None else f"reuse, slack {row['slack']}",
            f"{100 * row['local']:.1f}",
            f"{row['mean_s']:.2f}",
            f"{row['p50_s']:.2f}",
            f"{row['p95_s']:.2f}",
        ]
        for row in _rows(results, "slack")
    ]
    return _table(["routing", "reused, %", "mean, s", "p50, s", "p95, s"], rows)


def popular(results: Row) -> str:
    """A beginning that many have in common."""
    rows = [
        [
            row["routing"],
            f"{100 * row['local']:.1f}",
            f"{row['busiest']:.1f}",
            f"{row['p95_s']:,.1f}",
        ]
        for row in _rows(results, "popular")
    ]
    return _table(["routing", "reused, %", "busiest / mean", "p95, s"], rows)


def failures(results: Row) -> str:
    """Loss of replicas and recovery."""
    rows = [
        [
            f"{row['lost']} of {row['replicas']}",
            "yes" if row["tier"] else "no",
            f"{100 * (row['least_reused'] - 1):+.0f} %",
            f"{row['recovered_s']:.0f} s",
            f"{row['most_p95']:.1f}",
        ]
        for row in _rows(results, "failure")
        if row["lost"]
    ]
    head = ["lost", "tier", "reused, worst minute", "within 5 % after", "p95, worst 10 s"]
    return _table(head, rows)


def network(results: Row) -> str:
    """What a shared tier's network carries."""
    by_routing = {
        row["routing"]: row
        for row in _rows(results, "size", replicas=REPLICAS, tier=True)
        if row["routing"] in ("two-choices", "reuse")
    }
    rows = []
    for model in _rows(results, "model"):
        cells = [model["model"]]
        for row in by_routing.values():
            read = row["loaded_tokens_per_s"] * model["bytes_per_token"] / 1e9
            written = row["computed_tokens_per_s"] * model["bytes_per_token"] / 1e9
            cells += [f"{read:.2f} + {written:.2f}", f"{REPLICAS * (read + written):,.0f}"]
        rows.append(cells)
    head = ["model"]
    for routing in by_routing:
        head += [f"{routing}: read + written by a replica, GB/s", f"{REPLICAS:,} replicas, GB/s"]
    return _table(head, rows)


def reused(course: list[Row]) -> list[float]:
    """Tokens reused in the minute from each step on, of 10 s each."""
    tokens = [step["prompt_tokens"] - step["computed_tokens"] for step in course]
    return [sum(tokens[step : step + 6]) for step in range(len(tokens) - 5)]


TABLES: dict[str, Callable[[Row], str]] = {
    "models": models,
    "index": index,
    "routers": routers,
    "reports": reports,
    "sizes": sizes,
    "sampling": sampling,
    "stale": stale,
    "memory": memory,
    "slack": slack,
    "popular": popular,
    "failures": failures,
    "network": network,
}
