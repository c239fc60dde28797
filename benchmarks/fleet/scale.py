"""What does a fleet of up to 1,000 replicas reuse, how long does it wait, and what breaks first?

Simulated on traffic with a trace's statistics; writes results.json, plots and the tables of
docs/concepts/scale.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pictures
from benchmarks.common.measure import Row
from benchmarks.fleet import scale_page
from benchmarks.fleet.scale_costs import costs
from benchmarks.fleet.scale_page import CACHE_TOKENS, reused
from benchmarks.fleet.scale_traffic import BLOCK_TOKENS, Traffic
from kvboost.analyze.choices import ROUTINGS
from kvboost.analyze.fleet import Fleet, Setup, simulate
from kvboost.analyze.logs import LoggedRequest
from kvboost.routing.choice import Policy

PER_REPLICA_S = 1e8 / 86_400 / 1_000  # requests: 10^8 a day on 1,000 replicas
TIER_TOKENS = 3e6  # for each replica
PREFILL, LINK = 20_000.0, 95_367.0  # tokens/s; the link is 100 Gbit/s at 128 KiB a token
WARM_S, WARM_TIER_S = 200.0, 450.0  # longer than a cache keeps what is not used
NUM_REQUESTS = 4_000  # that are counted, of those that come after that
SIZES = (1, 4, 16, 64, 256, 1000)
BOOK_NAMES = 1 << 22  # enough for all that is sent
NUM_FAILURES = 4  # of which the mean is taken
WATCHED_S, STEP_S = 300.0, 10.0  # after a failure
FAILED_S = 60.0  # until lost replicas are back
RECOVERED = 0.05  # so near to what would have been reused without the loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's format")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and plots")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="keep other results as they are")


def run(options: argparse.Namespace) -> Iterator[Row]:
    traffic = Traffic(options.trace)
    rows = []
    for part in options.only or PARTS:
        for row in PARTS[part](traffic):
            rows.append(row)
            yield row
    file = options.out / "results.json"
    if options.only:
        measured_now = {row["what"] for row in rows}
        kept = json.loads(file.read_text())["rows"]
        rows = [row for row in kept if row["what"] not in measured_now] + rows
    results = {"assumed": assumed(traffic), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    for name, picture in pictures.scale(rows).items():
        (options.out / name).write_text(picture)
    scale_page.write(results)


def assumed(traffic: Traffic) -> dict[str, float]:
    """What all parts have in common."""
    return {
        "requests_per_s_and_replica": PER_REPLICA_S,
        "tokens_per_request": traffic.tokens_per_request,
        "cache_tokens": CACHE_TOKENS,
        "tier_tokens": TIER_TOKENS,
        "prefill_tokens_per_s": PREFILL,
        "link_tokens_per_s": LINK,
    }


def sampled(num_replicas: int) -> float:
    """The share of conversations that is simulated."""
    return max(0.1, min(1.0, 32 / num_replicas))


def setup(num_replicas: int, routing: str, share: float, *, tier: bool) -> Setup:
    """A fleet that gets a share of its traffic, with caches and speeds as much smaller.

    A cache then keeps a text for as many seconds as the whole one would, and queues are as long;
    times in queues are longer by 1 / share.
    """
    return Setup(
        num_replicas=num_replicas,
        routing=routing,
        cache_tokens=CACHE_TOKENS * share,
        shared_tokens=TIER_TOKENS * num_replicas * share if tier else 0.0,
        prefill_tokens_per_s=PREFILL * share,
        shared_tokens_per_s=LINK * share,
        book_names=BOOK_NAMES,
    )


def measured(
    traffic: Traffic,
    what: str,
    fleet: Setup,
    *,
    popular: float = 0.0,
    num_requests: int = NUM_REQUESTS,
    **about: Any,
) -> Row:
    """Shares and waits of a fleet once its caches are full."""
    share = fleet.prefill_tokens_per_s / PREFILL
    per_s = PER_REPLICA_S * fleet.num_replicas * share
    warm_s = WARM_TIER_S if fleet.shared_tokens else WARM_S
    counted_s = num_requests / per_s
    requests = traffic.requests(per_s, warm_s + counted_s, seed=1, popular=popular)
    started = time.process_time()
    result = simulate(requests, fleet, count_from_s=warm_s)
    used_s = time.process_time() - started
    tokens = result.prompt_tokens
    return {
        "what": what,
        **about,
        "replicas": fleet.num_replicas,
        "routing": fleet.routing,
        "tier": fleet.shared_tokens > 0,
        "sampled": share,
        "requests": result.num_requests,
        "local": result.local_tokens / tokens,
        "shared": result.shared_tokens / tokens,
        "computed": result.computed_tokens / tokens,
        "busiest": result.busiest,
        "p50_s": result.p50_wait_s * share,
        "p95_s": result.p95_wait_s * share,
        "mean_s": result.mean_wait_s * share,
        "loaded_tokens_per_s": result.shared_tokens / counted_s / fleet.num_replicas / share,
        "computed_tokens_per_s": result.computed_tokens / counted_s / fleet.num_replicas / share,
        "us_per_request": 1e6 * used_s / (per_s * (warm_s + counted_s)),
    }


def sizes(traffic: Traffic) -> Iterator[Row]:
    """All routings at all sizes, with a shared tier and without."""
    for num_replicas, tier, routing in product(SIZES, (False, True), ROUTINGS):
        fleet = setup(num_replicas, routing, sampled(num_replicas), tier=tier)
        yield measured(traffic, "size", fleet)


def sampling(traffic: Traffic) -> Iterator[Row]:
    """The same fleet whole and in samples: what the sampling changes."""
    for routing, share in product(("two-choices", "prefix-hash", "reuse"), (1.0, 0.25, 0.1)):
        fleet = setup(32, routing, share, tier=True)
        yield measured(traffic, "sampling", fleet, num_requests=3 * NUM_REQUESTS)


def stale(traffic: Traffic) -> Iterator[Row]:
    """Routers that do not see each other's requests, by how often replicas report."""
    whole = setup(16, "reuse", 0.5, tier=False)
    for num, every_s in ((1, None), (1, 10.0), (4, None), (4, 60.0), (4, 10.0), (4, 1.0)):
        fleet = replace(whole, num_routers=num, report_every_s=every_s or math.inf)
        yield measured(traffic, "stale", fleet, routers=num, report_every_s=every_s)


def memory(traffic: Traffic) -> Iterator[Row]:
    """A router that remembers less than its fleet holds."""
    fleet = setup(32, "reuse", 0.5, tier=False)
    held = 32 * fleet.cache_tokens / BLOCK_TOKENS
    for part in (1 / 32, 1 / 8, 1 / 2, 1, 2):
        fleet = replace(fleet, book_names=math.ceil(part * held))
        yield measured(traffic, "memory", fleet, remembered=part)


def slack(traffic: Traffic) -> Iterator[Row]:
    """How much longer a queue may be for the sake of what a replica holds."""
    for requests in (0, 1, 2, 4, 8):
        fleet = replace(setup(32, "reuse", 0.5, tier=False), policy=Policy(slack=requests))
        yield measured(traffic, "slack", fleet, slack=requests)
    yield measured(traffic, "slack", setup(32, "least-loaded", 0.5, tier=False), slack=None)


def popular(traffic: Traffic) -> Iterator[Row]:
    """A fifth of all conversations begins with the same 8,192 tokens."""
    for routing in ROUTINGS:
        row = measured(traffic, "popular", setup(64, routing, 0.25, tier=False), popular=0.2)
        yield row | {"popular": 0.2}


def failure(traffic: Traffic) -> Iterator[Row]:
    """Some replicas die with their caches, and are back, empty, after a minute."""
    share, num_replicas = 0.25, 60
    for tier in (False, True):
        fleet = setup(num_replicas, "reuse", share, tier=tier)
        courses: dict[int, list[list[Row]]] = {0: [], 1: [], num_replicas // 10: []}
        for seed in range(NUM_FAILURES):
            warm_s = WARM_TIER_S if tier else WARM_S
            per_s = PER_REPLICA_S * num_replicas * share
            requests = list(traffic.requests(per_s, warm_s + WATCHED_S, seed))
            warm = Fleet(fleet, seed)
            begins = next(n for n, request in enumerate(requests) if request.at_s >= warm_s)
            for request in requests[:begins]:
                warm.serve(request)
            for lost, runs in courses.items():
                runs.append(_course(copy.deepcopy(warm), requests[begins:], lost))
        usual = _mean(courses[0])
        for lost, runs in courses.items():
            row = {"what": "failure", "replicas": num_replicas, "tier": tier, "lost": lost}
            yield row | {"sampled": share, "course": _mean(runs)} | _against(_mean(runs), usual)


def _mean(courses: list[list[Row]]) -> list[Row]:
    return [
        {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        for steps in zip(*courses, strict=True)
    ]


def _course(fleet: Fleet, requests: list[LoggedRequest], num_lost: int) -> list[Row]:
    """What happened in each few seconds after the loss of some replicas."""
    share = fleet.setup.prefill_tokens_per_s / PREFILL
    lost = list(fleet.loads)[:num_lost]
    fleet.lose(lost)
    steps: list[list[Any]] = [[] for _ in range(round(WATCHED_S / STEP_S))]
    begin_s = requests[0].at_s
    for request in requests:
        if lost and request.at_s >= begin_s + FAILED_S:
            fleet.restore(lost)
            lost = []
        served = fleet.serve(request)
        steps[min(len(steps) - 1, int((request.at_s - begin_s) / STEP_S))].append(served)
    return [
        {
            "computed_tokens": sum(each.computed_tokens for each in step),
            "prompt_tokens": sum(
                each.computed_tokens + each.local_tokens + each.shared_tokens for each in step
            ),
            "p95_s": float(np.percentile([each.wait_s for each in step], 95)) * share,
        }
        for step in steps
    ]


def _against(course: list[Row], usual: list[Row]) -> Row:
    """How much less was reused than without the loss in a minute, and until when."""
    ratios = [ours / theirs for ours, theirs in zip(reused(course), reused(usual), strict=True)]
    back = [step for step, ratio in enumerate(ratios) if ratio < 1 - RECOVERED]
    return {
        "least_reused": min(ratios),
        "recovered_s": STEP_S * (back[-1] + 1) if back else 0.0,
        "most_p95": max(o["p95_s"] / t["p95_s"] for o, t in zip(course, usual, strict=True)),
    }


PARTS: dict[str, Callable[[Traffic], Iterable[Row]]] = {
    "costs": lambda _: costs(),
    "sampling": sampling,
    "memory": memory,
    "slack": slack,
    "popular": popular,
    "failure": failure,
    "stale": stale,
    "sizes": sizes,
}
