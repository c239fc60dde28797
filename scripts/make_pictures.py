"""Draw the pictures of the docs that show the terminal: `kvboost top` with made-up figures."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from kvboost.cli.screen import draw

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
NOON = time.mktime((2025, 1, 15, 12, 0, 0, 0, 0, -1))  # of wherever this runs

DISK = {
    "is_up": True,
    "num_entries": 9214,
    "size_bytes": 3.4 * 2**30,
    "budget_bytes": 8 * 2**30,
    "hits": 812,
    "misses": 97,
    "written": 9214,
    "dropped": 0,
    "faults": 0,
}
STATS: dict[str, Any] = {
    "engine": {
        "hot_chunks": 1863,
        "hot_memory_mb": 1331.0,
        "budget_mb": 2048.0,
        "cache_hits": 48210,
        "cache_misses": 6120,
        "tiers": {
            "disk": DISK,
            "redis": {**DISK, "is_up": False, "budget_bytes": 0, "dropped": 37, "faults": 3},
        },
    },
    "batch": {"num_running": 11, "max_batch_size": 16, "num_waiting": 3, "max_queue_size": 256},
    "requests": {
        "uptime_s": 5460.0,
        "num_requests": 23104,
        "num_errors": 12,
        "requests_per_s": 4.3,
        "errors_per_s": 0.02,
        "prompt_tokens_per_s": 6120.0,
        "generated_tokens_per_s": 214.0,
        "prompt_tokens": {"exact": 251000, "moved": 72000, "miss": 44000, "repaired": 11000},
        "ttft_s": {"p50": 0.182, "p95": 1.24},
        "itl_s": {"p50": 0.0382, "p95": 0.0715},
        "queue_s": {"p50": 0.0011, "p95": 0.42},
        "recent_errors": [
            {
                "at": NOON + 40 * number,
                "request_id": request_id,
                "endpoint": "/v1/chat/completions",
                "status": status,
                "error": error,
            }
            for number, (request_id, status, error) in enumerate(
                [
                    ("req-5b1f0c9a", 400, "context_length_exceeded"),
                    ("req-77a0e2d4", 503, "queue_full"),
                    ("req-1c9e44f0", 504, "deadline_exceeded"),
                ]
            )
        ],
    },
}


def top_svg() -> str:
    """`kvboost top` as a picture."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(draw(STATS, "http://127.0.0.1:8000"))
    return console.export_svg(title="kvboost top", unique_id="kvboost-top")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "top.svg").write_text(top_svg())
