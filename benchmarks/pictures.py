"""Draw the docs' pictures, and the tables of scale.md, from kept results.

python -m benchmarks.pictures
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.fleet.scale_page import reused, write
from kvboost.bench.records import Line as Row
from kvboost.drawing import svg
from kvboost.drawing.plots import Line, Point, Scale, lines, points
from kvboost.drawing.standalone import standalone

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCALE = ROOT / "docs" / "concepts" / "scale"
# Okabe and Ito's colours, which colour-blind people can tell apart, on light and dark pages.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#777777", "#b8860b", "#56b4e9", "#8f4e9e")
COLOURS = {f"c{number}": (colour, colour) for number, colour in enumerate(PALETTE)}
TITLE_HEIGHT, GAP = 22.0, 12.0
FAMILIES = ("sampled", "heads", "CacheBlend", "query", "move only", "concatenate")
POLICIES = ("ours", "LRU", "LFU", "ARC", "LRU-2", "GDSF", "S3-FIFO", "clairvoyant")
TRACES = ("conversation_trace", "conversation_trace, second half", "synthetic_trace")
ROUTINGS = ("reuse", "prefix-hash", "least-loaded", "two-choices", "round-robin")
TIERS = {False: "caches of the replicas only", True: "and a shared tier"}


def rows_of(name: str) -> list[Row]:
    files = sorted(RESULTS.glob(f"{name}.json"))
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def panels(drawn: Sequence[tuple[str, str]], columns: int) -> str:
    """Titled drawings side by side, in one file."""
    heights = [float(re.findall(r'viewBox="0 0 \S+ (\S+?)"', each)[0]) for _, each in drawn]
    row_height = TITLE_HEIGHT + max(heights)
    marks = []
    for number, ((title, each), height) in enumerate(zip(drawn, heights, strict=True)):
        x, y = (number % columns) * (svg.WIDTH + GAP), (number // columns) * row_height
        marks.append(svg.words(x + svg.WIDTH / 2, y + 14, title, "", "middle"))
        place = f'x="{x:g}" y="{y + TITLE_HEIGHT:g}" width="{svg.WIDTH:g}" height="{height:g}"'
        marks.append(each.replace("<svg ", f"<svg {place} ", 1))
    width = columns * (svg.WIDTH + GAP) - GAP
    view = f'viewBox="0 0 {width:g} {-(-len(drawn) // columns) * row_height:g}" role="img"'
    return standalone(f"<svg {view}>{''.join(marks)}</svg>", COLOURS, round(width))


def frontier() -> str:
    """Quality against time of repairs; what was not stored by other prompts is named."""
    rows = rows_of("quality-*")
    x, y = Scale("TTFT / full prefill", from_zero=True), Scale("KL, nats", is_log=True)
    keys = [(family, f"c{number}") for number, family in enumerate(FAMILIES)]
    drawn = []
    for case in dict.fromkeys(_case(row) for row in rows):
        named = [
            Point(_named(row), f"c{number}", row["time_share"], row["kl"])
            for number, family in enumerate(FAMILIES)
            for row in rows
            if _case(row) == case and row["case"].startswith(family)
        ]
        title = "{} {}, {}".format(*case)
        drawn.append((title, points(named, x, y, title, keys=keys)))
    return panels(drawn, 2)


def _case(row: Row) -> tuple[str, str, str]:
    return row["model"], row["dtype"], row["task"]


def _named(row: Row) -> str:
    return "" if row["encoding"] == "other prompts" else row["encoding"]


def eviction() -> str:
    """Prefix hits of a tier that starts empty, by policy."""
    rows = rows_of("eviction")
    x = Scale("size of the tier / working set, %", is_log=True)
    y = Scale("prefix hits, % of all blocks", from_zero=True)
    drawn = []
    for trace in TRACES:
        series = [
            Line(policy, f"c{number}", _shares(rows, trace, policy))
            for number, policy in enumerate(POLICIES)
        ]
        drawn.append((trace.replace("_", " "), lines(series, x, y, trace)))
    return panels(drawn, len(drawn))


def _shares(rows: Sequence[Row], trace: str, policy: str) -> tuple[tuple[float, float], ...]:
    own = [row for row in rows if (row["trace"], row["policy"]) == (trace, policy)]
    return tuple((100 * row["share"], 100 * row["prefix_hits"]) for row in own)


def targets() -> str:
    """What `inter_token_target_ms` trades: a long prompt's time against running streams."""
    rows = rows_of("stalls-targets-*")
    usual = [row["busy_p50_ms"] / row["quiet_p50_ms"] for row in rows]
    named = [Point(f"{r['target']} ms", "c1", r["long_ratio"], r["p95_ratio"]) for r in rows]
    named += [Point("", "c2", row["long_ratio"], y) for row, y in zip(rows, usual, strict=True)]
    x = Scale("time to first token of a 4,096-token prompt, alone = 1")
    y = Scale("time between tokens of 8 streams, undisturbed = 1", is_log=True)
    title = "inter_token_target_ms: lower left is better"
    keys = [("95th percentile", "c1"), ("median", "c2")]
    return panels([(title, points(named, x, y, title, keys=keys))], 1)


def by_size(rows: Sequence[Row], value: Callable[[Row], float], title: str) -> str:
    """A figure of all routings by the number of replicas, at the same traffic for each."""
    x, y = Scale("replicas", is_log=True), Scale(title, from_zero=True)
    over = [value(row) for row in rows if row["what"] == "size"]
    drawn = []
    for tier, name in TIERS.items():
        own = [row for row in rows if row["what"] == "size" and row["tier"] is tier]
        series = [
            Line(each, css, tuple((r["replicas"], value(r)) for r in own if r["routing"] == each))
            for each, css in zip(ROUTINGS, COLOURS, strict=False)
        ]
        drawn.append((name, lines(series, x, y, name, over)))
    return panels(drawn, len(drawn))


def failures(rows: Sequence[Row]) -> str:
    """Tokens reused in each minute after a loss, relative to the fleet without it."""
    x, y = Scale("seconds since the loss"), Scale("tokens reused / without loss", mark=1.0)
    over = [row["least_reused"] for row in rows if row["what"] == "failure"]
    drawn = []
    for tier, name in TIERS.items():
        own = [row for row in rows if row["what"] == "failure" and row["tier"] is tier]
        usual = reused(next(row["course"] for row in own if not row["lost"]))
        series = []
        for row in own:
            if row["lost"]:
                ratios = [a / b for a, b in zip(reused(row["course"]), usual, strict=True)]
                course = tuple((10 * step + 30, ratio) for step, ratio in enumerate(ratios))
                label = f"{row['lost']} of {row['replicas']} lost"
                series.append(Line(label, f"c{len(series)}", course))
        drawn.append((name, lines(series, x, y, name, over)))
    return panels(drawn, len(drawn))


def scale(rows: Sequence[Row]) -> dict[str, str]:
    """The pictures of the `scale` question, by file name."""
    return {
        "reuse.svg": by_size(rows, lambda r: 100 * (1 - r["computed"]), "prompt tokens reused, %"),
        "wait.svg": by_size(rows, lambda row: row["p95_s"], "95 % of prompts are read after, s"),
        "failure.svg": failures(rows),
    }


def pictures() -> dict[Path, str]:
    """All of them."""
    docs = ROOT / "docs"
    drawn = {
        docs / "concepts" / "frontier.svg": frontier(),
        docs / "concepts" / "eviction.svg": eviction(),
        docs / "pictures" / "inter-token-target.svg": targets(),
    }
    of_scale = scale(json.loads((SCALE / "results.json").read_text())["rows"])
    return drawn | {SCALE / name: picture for name, picture in of_scale.items()}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture)
    write(json.loads((SCALE / "results.json").read_text()))
