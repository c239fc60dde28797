"""Tables and choices of questions' rows, which are plain dictionaries."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost.bench.report.formats import ms, nats, percent, plain, times
from kvboost.bench.report.section import Row, Table

_Rows = Sequence[Mapping[str, Any]]

# Every line carries these; the section "Reproduce" shows them once.
_PROVENANCE = ("kind", "question", "model", "dtype", "seed", "machine", "versions", "commit")
TOP1 = (
    "top-1 here is agreement with the same model's full prefill in the same dtype, over 4 tokens"
    " of each prompt: a sanity check, not a measure of quality."
)
_TITLES = {
    "ours_ms": "kvboost, ms",
    "bare_ms": "generate(), ms",
    "full_ms": "full prefill, ms",
    "ttft_ms": "first token, ms",
    "total_ms": "whole answer, ms",
    "store_ms": "store, ms",
    "load_ms": "load, ms",
    "prefill_ms": "prefill, ms",
    "top1": "top-1",
    "kl": "KL, nats",
    "kv_bytes_per_token": "K/V bytes per token",
    "stored_bytes_per_token": "stored bytes per token",
    "break_even_requests": "break-even requests",
    "exact_hit_rate": "exact hits",
    "hit_rate": "hits",
    "chunk_size": "chunk",
}


def table(rows: _Rows, *first: str, fold: str = "") -> Table:
    """Return all fields of rows as a table, the named ones in front."""
    names = [name for name in first if any(name in row for row in rows)]
    for row in rows:
        names += [n for n in row if n not in names and n not in _PROVENANCE and _is_short(row[n])]
    made = tuple(Row(tuple(_written(name, row.get(name)) for name in names)) for row in rows)
    return Table(tuple(_TITLES.get(name, name.replace("_", " ")) for name in names), made, fold)


def drop_empty(rows: _Rows, *names: str) -> list[Mapping[str, Any]]:
    """Return the rows that have a value for each of the names."""
    return [row for row in rows if all(row.get(name) is not None for name in names)]


def values(rows: _Rows, name: str) -> list[Any]:
    """Return the different values of a field, in order."""
    return sorted({row[name] for row in rows})


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _written(name: str, value: Any) -> str:
    write: Callable[[Any], str] = plain
    if name.endswith("_ms"):
        write = ms
    elif name in ("ratio", "break_even_requests"):
        write = times
    elif name == "kl":
        write = nats
    elif name == "top1" or name.endswith(("share", "_rate")):
        write = percent
    return write(value)
