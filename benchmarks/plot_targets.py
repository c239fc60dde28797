"""Draw what `inter_token_target_ms` trades: a long prompt's time against running streams.

python benchmarks/plot_targets.py docs/pictures/inter-token-target.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FLOOR_MS = 400  # targets up to this one leave no more than the floor beside 8 streams
RESULT = Path(__file__).parent / "results" / "stalls-targets-smollm2-fp32.json"


def main() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    prompt = [row["long_ratio"] for row in rows]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kvboost", "font.size": 10}
    figure, axis = plt.subplots(figsize=(6.4, 4))
    streams = [row["busy_p50_ms"] / row["quiet_p50_ms"] for row in rows]
    late = [row["p95_ratio"] for row in rows]
    axis.plot(prompt, late, "s", color="#c98b2b", label="95th percentile")
    axis.plot(prompt, streams, "o", color="#1f6f54", label="median")
    floor = [row["target"] for row in rows if row["target"] <= FLOOR_MS]
    for row, x, y in zip(rows, prompt, late, strict=True):
        if row["target"] > FLOOR_MS:
            axis.annotate(f"{row['target']} ms", (x, y), (8, 4), textcoords="offset points")
    axis.annotate(
        f"{', '.join(map(str, floor))} ms: the floor\nof 64 prompt tokens a step",
        (max(prompt), max(late[: len(floor)])),
        (0, 18),
        textcoords="offset points",
        horizontalalignment="right",
    )
    axis.set_yscale("log")
    axis.set_ylim(1, 16)
    axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axis.set_xlabel("time to first token of a 4,096-token prompt, alone = 1")
    axis.set_ylabel("time between tokens of 8 streams,\nundisturbed = 1")
    axis.set_title("inter_token_target_ms: lower left is better", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
