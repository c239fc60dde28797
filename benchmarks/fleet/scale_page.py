"""The tables of docs/concepts/scale.md, from the results of the `scale` benchmark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
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


def reused(course: list[Row]) -> list[float]:
    """Tokens reused in the minute from each step on, of 10 s each."""
    tokens = [step["prompt_tokens"] - step["computed_tokens"] for step in course]
    return [sum(tokens[step : step + 6]) for step in range(len(tokens) - 5)]


def _part(name: str, table: str) -> str:
    return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end of table -->"


def _table(head: str, line: str, rows: Iterable[Row]) -> str:
    """A table with a line, which is a format, for each row."""
    lines = [head, re.sub(r"[^|]+", " --- ", head).strip(), *(line.format(**row) for row in rows)]
    return "\n".join(f"| {each} |" for each in lines)


def _rows(results: Row, what: str) -> Iterator[Row]:
    """The rows of a kind, with shares in percent and words for what is yes or no."""
    for row in results["rows"]:
        if row["what"] == what:
            yield row | {
                **{f"{each}_pc": 100 * row[each] for each in ("local", "shared") if each in row},
                "with_tier": "yes" if row.get("tier") else "no",
            }


def models(results: Row) -> str:
    """Bytes and break-even bandwidth of models."""
    tokens = results["assumed"]["cache_tokens"]
    rows = (
        row | {"held_gb": tokens * row["bytes_per_token"] / 1e9} for row in _rows(results, "model")
    )
    return _table(
        f"model | bytes/token | {tokens / 1e6:g} M tokens | GPUs | prefill tokens/s | GB/s",
        "{model} | {bytes_per_token:,} | {held_gb:,.0f} GB | {gpus} | {prefill_tokens_per_s:,.0f}"
        " | {break_even_gb_per_s:.1f}",
        rows,
    )


def index(results: Row) -> str:
    """What an index weighs."""
    line = "{chunks:,} | {bytes:.0f}"
    return _table("chunks | bytes/chunk", line, _rows(results, "index"))


def routers(results: Row) -> str:
    """What a router weighs and needs."""
    rows = (
        row
        | {"book_mb": row["bytes_per_anchor"] * 2**20 / 1e6}
        | {"route_ms": 1e3 * row["route_s"], "rate": 1 / row["route_s"]}
        for row in _rows(results, "router")
    )
    return _table(
        "replicas | bytes/anchor | 2^20 anchors | time for a request | requests/s",
        "{replicas:,} | {bytes_per_anchor:.0f} | {book_mb:.0f} MB | "
        "{route_ms:.1f} ms | {rate:,.0f}",
        rows,
    )


def reports(results: Row) -> str:
    """Traffic of full reports through Ray Serve's controller."""
    rows = (
        row | {"in_mb": row["to_controller"] / 1e6, "out_mb": row["to_router"] / 1e6}
        for row in _rows(results, "report")
    )
    head = "replicas | to the controller, MB/s | to each router, MB/s"
    return _table(head, "{replicas:,} | {in_mb:,.1f} | {out_mb:,.0f}", rows)


def sizes(results: Row) -> str:
    """Reuse and waits of all routings, by size."""
    return _table(
        "replicas | tier | routing | own cache, % | tier, % | p50, s | p95, s",
        "{replicas:,} | {with_tier} | {routing} | {local_pc:.1f} | {shared_pc:.1f} | {p50_s:.2f}"
        " | {p95_s:.2f}",
        (row for row in _rows(results, "size") if row["replicas"] in (4, 64, REPLICAS)),
    )


def sampling(results: Row) -> str:
    """What sampling changes."""
    rows = list(_rows(results, "sampling"))
    whole = {row["routing"]: row for row in rows if row["sampled"] == 1.0}
    for row in rows:
        wanted = whole[row["routing"]]
        row["reused"] = 100 * (1 - row["computed"])
        row["points"] = 100 * (wanted["computed"] - row["computed"])
        row["error"] = 100 * (row["p95_s"] / wanted["p95_s"] - 1)
    return _table(
        "routing | sample | reused, % | error, points | p95, s | error",
        "{routing} | {sampled:g} | {reused:.1f} | {points:+.1f} | {p95_s:.2f} | {error:+.0f} %",
        rows,
    )


def stale(results: Row) -> str:
    """Reports and routers."""
    rows = list(_rows(results, "stale"))
    for row in rows:
        every_s = row["report_every_s"]
        row["reports"] = f"every {every_s:g} s" if every_s else "never"
    line = "{routers} | {reports} | {local_pc:.1f} | {p95_s:.2f}"
    return _table("routers | reports | reused, % | p95, s", line, rows)


def memory(results: Row) -> str:
    """Routers that remember less than all."""
    line = "{remembered:g} | {local_pc:.1f} | {p95_s:.2f}"
    return _table("remembered / held | reused, % | p95, s", line, _rows(results, "memory"))


def slack(results: Row) -> str:
    """Queues against reuse."""
    rows = list(_rows(results, "slack"))
    for row in rows:
        row["name"] = "least-loaded" if row["slack"] is None else f"reuse, slack {row['slack']}"
    line = "{name} | {local_pc:.1f} | {mean_s:.2f} | {p50_s:.2f} | {p95_s:.2f}"
    return _table("routing | reused, % | mean, s | p50, s | p95, s", line, rows)


def popular(results: Row) -> str:
    """A beginning that many have in common."""
    line = "{routing} | {local_pc:.1f} | {busiest:.1f} | {p95_s:,.1f}"
    head = "routing | reused, % | busiest / mean | p95, s"
    return _table(head, line, _rows(results, "popular"))


def failures(results: Row) -> str:
    """Loss of replicas and recovery."""
    rows = (
        row | {"less": 100 * (row["least_reused"] - 1)}
        for row in _rows(results, "failure")
        if row["lost"]
    )
    return _table(
        "lost | tier | reused, worst minute | within 5 % after | p95, worst 10 s",
        "{lost} of {replicas} | {with_tier} | {less:+.0f} % | {recovered_s:.0f} s | {most_p95:.1f}",
        rows,
    )


def network(results: Row) -> str:
    """What a shared tier's network carries."""
    head, rows = "model", [row | {"line": row["model"]} for row in _rows(results, "model")]
    for size in _rows(results, "size"):
        name = size["routing"]
        if size["replicas"] != REPLICAS or not size["tier"] or name not in ("two-choices", "reuse"):
            continue
        head += f" | {name}: read + written by a replica, GB/s | {REPLICAS:,} replicas, GB/s"
        for row in rows:
            read, written = (
                size[f"{way}_tokens_per_s"] * row["bytes_per_token"] / 1e9
                for way in ("loaded", "computed")
            )
            row["line"] += f" | {read:.2f} + {written:.2f} | {REPLICAS * (read + written):,.0f}"
    return _table(head, "{line}", rows)


TABLES: dict[str, Callable[[Row], str]] = {
    each.__name__: each
    for each in (models, index, routers, reports, sizes, sampling, stale, memory, slack, popular,
                 failures, network)
}  # fmt: skip
