"""Draw the pictures of the docs that show the terminal; the figures in them are made up.

With --model MODEL, also what is measured: `kvboost explain` on a prompt, and the table of the
examples, which takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvboost import KVBoost
from kvboost.cli import explain
from kvboost.cli.screen import draw
from kvboost.server.options import add_flags

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
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


STARTING = """\
$ kvboost serve --model HuggingFaceTB/SmolLM2-135M-Instruct --warm handbook.txt
loading HuggingFaceTB/SmolLM2-135M-Instruct ...
loading HuggingFaceTB/SmolLM2-135M-Instruct: 4.3 s
certifying ...
certifying: 4.3 s
warming 1 text ...
warming 1 text: 1.9 s
serving SmolLM2-135M-Instruct at http://127.0.0.1:8000
"""


def top_svg() -> str:
    """`kvboost top` as a picture."""
    return _drawn(draw(STATS, "http://127.0.0.1:8000"), "top")


def help_svg() -> str:
    """`kvboost serve --help` as a picture."""
    parser = argparse.ArgumentParser(prog="kvboost serve")
    parser.formatter_class = partial(argparse.HelpFormatter, width=96)
    add_flags(parser)
    return _drawn(Text(parser.format_help()), "serve --help", width=100)


def start_svg() -> str:
    """The start of a server as a picture."""
    return _drawn(Text(STARTING), "serve")


def list_svg() -> str:
    """`examples/run.py --list` as a picture."""
    from examples.run import listed  # noqa: PLC0415

    return _drawn(Text(listed()), "examples/run.py --list", program="python")


def examples_svg(model: str) -> str:
    """The table of all examples as a picture, measured here and now."""
    from examples import common, run  # noqa: PLC0415

    settings = common.read_settings(ROOT / "examples" / ".env", os.environ, model)
    table = run.run(list(run.EXAMPLES), settings, Console(stderr=True), is_demo=True)
    return _drawn(table, "examples/run.py", program="python")


SYSTEM = (
    "You answer questions of our customers. Be brief and friendly. Use only the documents below, "
    "and say so if the answer is not in them.\n\n"
)
RETURNS = (
    "Returns\nYou can send back any product within 30 days of delivery. Unused products are "
    "refunded in full, used ones after an inspection. The refund goes to the card that you paid "
    "with and takes up to five working days. Shipping is free for products that arrived damaged; "
    "in all other cases you pay for the parcel. Gift cards, opened software and products made to "
    "order cannot be returned. Ask for a label in your account, print it, and hand in the parcel "
    "at any post office. Keep the receipt until the money is back on your account.\n\n"
)
SHIPPING = (
    "Shipping\nOrders placed before noon leave our warehouse on the same day, all others on the "
    "next. Standard delivery takes two to four working days, express delivery one. Delivery is "
    "free from 50 euros on; below, it costs 4.90 euros, and 12.90 euros for express. We deliver "
    "to all countries of the European Union, to Norway and to Switzerland, where customs may add "
    "duties. You can follow a parcel in your account from the moment it has left. A parcel that "
    "is not there after ten days counts as lost, and we send the order again.\n\n"
)


def explain_svg(model: str) -> str:
    """`kvboost explain` as a picture: one document in its place, one moved, a new question."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    with KVBoost.from_pretrained(model, reuse="auto", chunk_size=32) as engine:
        engine.generate(SYSTEM + RETURNS + SHIPPING + "Question: How do I return a product?", 1)
        prompt = SYSTEM + SHIPPING + RETURNS + "Question: What does express delivery cost?"
        report = dataclasses.replace(engine.explain(prompt), predicted_ms=None)
        explain.draw(report, engine.tokenizer(prompt).input_ids, engine.tokenizer, console)
    return console.export_svg(title="kvboost explain prompt.txt", unique_id="kvboost-explain")


def _drawn(what: Any, command: str, width: int = 80, program: str = "kvboost") -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(what)
    name = command.replace(" ", "").replace("--", "-").replace("/", "-").replace(".", "-")
    return console.export_svg(title=f"{program} {command}", unique_id=f"kvboost-{name}")


DRAWN = {
    "top.svg": top_svg,
    "serve-help.svg": help_svg,
    "serve-start.svg": start_svg,
    "examples-list.svg": list_svg,
}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="draw what needs a model, with this one")
    chosen = parser.parse_args().model
    PICTURES.mkdir(exist_ok=True)
    for name, draw_it in DRAWN.items():
        (PICTURES / name).write_text(draw_it())
    if chosen:
        (PICTURES / "explain.svg").write_text(explain_svg(chosen))
        (PICTURES / "examples.svg").write_text(examples_svg(chosen))
