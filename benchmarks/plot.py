"""Draw the frontier of quality against time from kept results of the `quality` benchmark.

python benchmarks/plot.py OUT.png [RESULT.json ...]   (default: benchmarks/results/quality-*.json)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

FAMILIES = {
    "sampled": ("#1f6f54", "o"),
    "heads": ("#c98b2b", "s"),
    "CacheBlend": ("#8f4e9e", "^"),
    "query": ("#3d7ab8", "v"),
    "sensitivity": ("#b0553f", "D"),
    "move only": ("#555555", "x"),
    "concatenate": ("#aa2222", "X"),
}


def main() -> None:
    out, *names = sys.argv[1:]
    kept = Path(__file__).parent / "results"
    files = [Path(name) for name in names] or sorted(kept.glob("quality-*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    panels = list(dict.fromkeys((row["model"], row["task"]) for row in rows))
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4.2 * lines), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel, [row for row in rows if (row["model"], row["task"]) == panel])
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    marks = [
        Line2D([], [], color=colour, marker=marker, linestyle="-" if name == "sampled" else "")
        for name, (colour, marker) in FAMILIES.items()
    ]
    figure.legend(marks, FAMILIES, loc="lower center", ncols=len(FAMILIES), frameon=False)
    figure.suptitle(
        "Moved K/V: distance to full prefill against time (lower left is better)\n"
        "full marks: stored by other prompts; hollow: encoded alone; grey: warmed",
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 0.99))
    figure.savefig(out, dpi=110)


def _draw(axis: Any, panel: tuple[str, str], rows: list[dict[str, Any]]) -> None:
    axis.set_title(f"{panel[0]}, {panel[1]} ({rows[0]['prompts']} prompts)", fontsize=10)
    for family, (colour, marker) in FAMILIES.items():
        for encoding, fill in (("other prompts", colour), ("alone", "none"), ("warmed", "#dddddd")):
            own = [r for r in rows if r["case"].startswith(family) and r["encoding"] == encoding]
            own = [r for r in own if "no heads" not in r["case"]]
            if not own:
                continue
            x, y = [r["time_share"] for r in own], [r["kl"] for r in own]
            is_line = family == "sampled" and encoding == "other prompts"
            axis.plot(
                x,
                y,
                marker if not is_line else f"{marker}-",
                color=colour,
                markerfacecolor=fill,
                markersize=6,
            )
    floor = [r["kl"] for r in rows if r["encoding"] == "same prompt"]
    if floor:
        axis.axhline(max(floor[0], 1e-4), color="#999999", linestyle=":", linewidth=1)
        axis.text(0.02, max(floor[0], 1e-4) * 1.1, "exact reuse (rounding)", fontsize=8)
    axis.axhline(0.02, color="#cccccc", linewidth=1)
    axis.axvline(0.2, color="#cccccc", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlim(0, 0.6)
    axis.set_xlabel("time to first token / full prefill")
    axis.set_ylabel("KL on the answer's tokens, nats")


if __name__ == "__main__":
    main()
