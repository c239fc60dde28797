"""Draw hit rates of eviction policies against the size of the tier.

python benchmarks/plot_eviction.py OUT.png [RESULT.json]   (default: results/eviction.json)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LINES = {
    "clairvoyant": {"color": "#999999", "linestyle": "--", "label": "clairvoyant (bound)"},
    "ours": {"color": "#1f6f54", "marker": "o", "linewidth": 2.6, "zorder": 5},
    "LRU": {"color": "#3d7ab8", "marker": "v"},
    "LFU": {"color": "#aa2222", "marker": "X"},
    "ARC": {"color": "#8f4e9e", "marker": "^"},
    "LRU-2": {"color": "#c98b2b", "marker": "s"},
    "GDSF": {"color": "#555555", "marker": "D"},
    "S3-FIFO": {"color": "#b07a92", "marker": "P"},
}
TITLES = {
    "conversation_trace": "conversation trace",
    "conversation_trace, second half": "conversation trace, second half",
    "synthetic_trace": "synthetic trace",
}


def main() -> None:
    out, *names = sys.argv[1:]
    file = Path(names[0]) if names else Path(__file__).parent / "results" / "eviction.json"
    rows = json.loads(file.read_text())["rows"]
    figure, axes = plt.subplots(1, len(TITLES), figsize=(13, 4.6))
    for axis, trace in zip(axes, TITLES, strict=True):
        _draw(axis, [row for row in rows if row["trace"] == trace])
        axis.set_title(TITLES[trace], fontsize=11)
    axes[0].set_ylabel("prefix hits, % of all blocks")
    marks, labels = axes[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="lower center", ncols=len(LINES), frameon=False)
    figure.suptitle("Prefix hits of a tier that starts empty, by eviction policy", fontsize=12)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(out, dpi=110)


def _draw(axis: Any, rows: list[dict[str, Any]]) -> None:
    for policy, style in LINES.items():
        own = [row for row in rows if row["policy"] == policy]
        sizes = [100 * row["share"] for row in own]
        hits = [100 * row["prefix_hits"] for row in own]
        axis.plot(sizes, hits, **{"label": policy, "linewidth": 1.3, "markersize": 5} | style)
    axis.set_xscale("log")
    axis.set_xticks([1, 3, 10, 30], ["1 %", "3 %", "10 %", "30 %"])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("size of the tier / working set")
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)


if __name__ == "__main__":
    main()
