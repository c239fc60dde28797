"""What routers and K/V weigh."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from kvboost.routing.book import Book
from kvboost.routing.choice import Policy, rank

# name, parameters in 10^9, GPUs of a replica, layers, K/V heads, head size: from their configs
MODELS = (
    ("SmolLM2-135M", 0.135, 1, 30, 3, 64),
    ("Qwen2.5-0.5B", 0.494, 1, 24, 2, 64),
    ("Qwen2.5-7B", 7.62, 1, 28, 4, 128),
    ("Llama-3.1-8B", 8.03, 1, 32, 8, 128),
    ("Qwen2.5-32B", 32.8, 2, 64, 8, 128),
    ("Llama-3.1-70B", 70.6, 4, 80, 8, 128),
)
FLOPS = 0.4 * 989e12  # an H100's dense bf16 peak, of which prefill gets about 40 %
PROMPT_ANCHORS = 752  # of 12,035 tokens
BOOK_ANCHORS = 1 << 16
NUM_PROMPTS = 60
REPORT_BYTES = 8 * 2**14  # at most
REPORT_PERIOD_S = 5.0
CONTROLLER_TURNS_PER_S = 10  # of Ray Serve 2.60, RAY_SERVE_CONTROL_LOOP_INTERVAL_S


def costs() -> list[dict[str, Any]]:
    """Rows for models, and for routers and reports by number of replicas."""
    routers, reports = map(_router, (10, 100, 1000)), map(_report, (4, 16, 64, 256, 1000))
    return [*map(_model, MODELS), *routers, *reports]


def bytes_per_token(layers: int, kv_heads: int, head_size: int) -> int:
    """K and V in bf16."""
    return 2 * layers * kv_heads * head_size * 2


def _model(model: tuple[str, float, int, int, int, int]) -> dict[str, Any]:
    name, billions, gpus, *shape = model
    size = bytes_per_token(*shape)
    prefill = FLOPS * gpus / (2e9 * billions)
    row = {"what": "model", "model": name, "gpus": gpus, "bytes_per_token": size}
    return row | {"prefill_tokens_per_s": prefill, "break_even_gb_per_s": size * prefill / 1e9}


def _router(num_replicas: int) -> dict[str, Any]:
    chance = np.random.default_rng(0)
    replicas = [str(number) for number in range(num_replicas)]
    tracemalloc.start()
    book = Book(BOOK_ANCHORS)
    for number in range(max(num_replicas, BOOK_ANCHORS // PROMPT_ANCHORS + 1)):
        book.sent(_prompt(chance), replicas[number % num_replicas])
    size = tracemalloc.get_traced_memory()[0] / len(book)
    tracemalloc.stop()
    loads = dict.fromkeys(replicas, 0)
    draw = random.Random(0)

    def route() -> float:
        anchors = _prompt(chance)
        started = time.process_time()
        shares = book.shares(anchors, in_order=True)
        ranked = rank(shares, loads, Policy())
        book.sent(anchors, ranked[0] if ranked else draw.choice(replicas))
        return time.process_time() - started

    taken = statistics.median(route() for _ in range(NUM_PROMPTS))
    return {"what": "router", "replicas": num_replicas, "bytes_per_anchor": size, "route_s": taken}


def _report(num_replicas: int) -> dict[str, Any]:
    """Ray Serve's controller sends all reports to a router when it has heard of a new one."""
    at_once = num_replicas * REPORT_BYTES
    sendings_per_s = min(CONTROLLER_TURNS_PER_S, num_replicas / REPORT_PERIOD_S)
    row = {"what": "report", "replicas": num_replicas, "to_controller": at_once / REPORT_PERIOD_S}
    return row | {"to_router": at_once * sendings_per_s}


def _prompt(chance: Any) -> Any:
    """Anchors of which the first few are everybody's."""
    anchors = chance.integers(2, 2**63, PROMPT_ANCHORS, dtype=np.uint64)
    anchors[:32] = np.arange(2, 34, dtype=np.uint64)
    return anchors
