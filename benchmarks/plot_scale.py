"""Draw the results of the `scale` benchmark and write the tables of its page, from results.json.

python benchmarks/plot_scale.py docs/concepts/scale
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import scale_page
from scale_page import reused

# Okabe and Ito's colours, which colour-blind people can tell apart.
LINES = {
    "reuse": {"color": "#0072B2", "marker": "o", "linewidth": 2.6, "zorder": 5},
    "prefix-hash": {"color": "#D55E00", "marker": "s"},
    "least-loaded": {"color": "#009E73", "marker": "^"},
    "two-choices": {"color": "#CC79A7", "marker": "v"},
    "round-robin": {"color": "#777777", "marker": "X"},
}
PANELS = {False: "caches of the replicas only", True: "and a shared tier"}
TICKS = [1, 4, 16, 64, 256, 1000]
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 9})


def draw(results: dict[str, Any], out: Path) -> None:
    """All pictures of the page."""
    rows = [row for row in results["rows"] if row["what"] == "size"]
    _by_size(
        rows, lambda row: 100 * (1 - row["computed"]), "prompt tokens reused, %", out / "reuse.svg"
    )
    _by_size(rows, lambda row: row["p95_s"], "95 % of prompts are read after, s", out / "wait.svg")
    _failures([row for row in results["rows"] if row["what"] == "failure"], out / "failure.svg")


def _by_size(
    rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], label: str, file: Path
) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.3), sharey=True)
    for axis, (tier, title) in zip(axes, PANELS.items(), strict=True):
        ends = {}
        for routing, style in LINES.items():
            own = [row for row in rows if row["routing"] == routing and row["tier"] is tier]
            values = [value(row) for row in own]
            axis.plot(
                [row["replicas"] for row in own],
                values,
                **{"linewidth": 1.4, "markersize": 4} | style,
            )
            ends[routing] = values[-1]
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
        axis.minorticks_off()
        axis.set_xlabel("replicas, at the same traffic for each")
        _plain(axis)
        axis.ends = ends
    axes[0].set_ylim(0, 1.1 * axes[0].get_ylim()[1])
    axes[0].set_ylabel(label)
    for axis in axes:
        _label_ends(axis, axis.ends)
    figure.tight_layout(w_pad=0.5)
    _save(figure, file)


def _label_ends(axis: Any, ends: dict[str, float]) -> None:
    """Each line's name at its right end; names that would overlap push each other apart."""
    names = sorted(ends, key=ends.__getitem__)
    heights = [ends[name] for name in names]
    least = 0.062 * axis.get_ylim()[1]
    for _ in range(200):
        for n in range(len(heights) - 1):
            overlap = least - (heights[n + 1] - heights[n])
            if overlap > 0:
                heights[n] -= overlap / 2
                heights[n + 1] += overlap / 2
    for name, height in zip(names, heights, strict=True):
        axis.text(1250, height, name, color=LINES[name]["color"], va="center", fontsize=8.5)
    axis.set_xlim(0.8, 12_000)


def _failures(rows: list[dict[str, Any]], file: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), sharey=True)
    styles = {0: "#777777", 1: "#009E73", 6: "#D55E00"}
    for axis, (tier, title) in zip(axes, PANELS.items(), strict=True):
        axis.axvspan(0, 60, color="#eeeeee")
        axis.text(30, 0.82, "lost", ha="center", fontsize=8.5, color="#555555")
        for row in rows:
            if row["tier"] is tier and row["lost"]:
                usual = next(r for r in rows if r["tier"] is tier and not r["lost"])
                values = _ratios(row["course"], usual["course"])
                axis.plot(
                    [10 * step + 30 for step in range(len(values))],
                    values,
                    color=styles[row["lost"]],
                    label=f"{row['lost']} of {row['replicas']} lost",
                )
        axis.axhline(1, color="#777777", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds since the loss")
        _plain(axis)
    axes[0].set_ylim(0.8, 1.1)
    axes[0].set_ylabel("tokens reused / without loss")
    axes[0].legend(frameon=False, loc="lower right", fontsize=8.5)
    figure.tight_layout(w_pad=0.5)
    _save(figure, file)


def _ratios(course: list[dict[str, float]], usual: list[dict[str, float]]) -> list[float]:
    """Tokens reused in each minute, relative to the fleet without loss."""
    return [ours / theirs for ours, theirs in zip(reused(course), reused(usual), strict=True)]


def _plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    kept = json.loads((folder / "results.json").read_text())
    draw(kept, folder)
    scale_page.write(kept)
