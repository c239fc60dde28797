"""Many requests with a fault in the middle of them, and what must hold all the same."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from fakes import WordTokenizer, words
from kvboost import KVBoost
from tiny_models import SUPPORTED, build
from waiting import wait_until

DEADLINE_MS = 250
NUM_REQUESTS = int(os.environ.get("KVBOOST_TEST_FAULTS", "50"))
FAULT_BEGINS, FAULT_ENDS = 3 * NUM_REQUESTS // 10, 13 * NUM_REQUESTS // 20
NUM_NEW = 3
CHUNK_SIZE = 16
NUM_CHUNKS_IN_MEMORY = 30
PATIENCE_S = 60.0  # for what must happen at some time

# Eight families of prompts, each with a beginning of its own.
POOL = [
    words(32 + 8 * (number % 8), seed=number % 8) + words(28 + 41 * number % 34, seed=99 + number)
    for number in range(40)
]
REQUESTS = random.Random(1).choices(POOL, k=NUM_REQUESTS)


def engine_of(**options: Any) -> KVBoost:
    return KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), chunk_size=CHUNK_SIZE, **options)


@cache
def expected() -> list[list[int]]:
    """What an engine without tiers answers."""
    with engine_of() as engine:
        return [engine.generate(prompt, NUM_NEW).token_ids for prompt in REQUESTS]


@cache
def small_memory_bytes() -> int:
    with engine_of() as engine:
        frame_bytes = CHUNK_SIZE * engine._parts.model.geometry.bytes_per_token + 1024
    return NUM_CHUNKS_IN_MEMORY * frame_bytes


def nothing() -> None:
    """For a fault that is there from the start, or stays."""


class Trial:
    """An engine with little memory on top of a tier."""

    def __init__(self, engine: KVBoost, tier: str) -> None:
        self.engine, self.tier = engine, tier
        self.longest_s = 0.0  # of the requests of a run
        self._num_new = 0

    def make_reading_pay(self) -> None:
        """Let the engine believe that its model is slower than any tier."""
        self.engine._parts.cost.predict = lambda work: 1.0  # type: ignore[method-assign]

    def stats(self) -> dict[str, Any]:
        """Counts of the tier, and those of the engine that faults raise."""
        stats = self.engine.cache_stats()
        return {
            **stats["tiers"][self.tier],
            "damaged": stats["damaged_frames"],
            "tier_faults": stats["tier_faults"],
            "dropped_writes": stats["dropped_writes"],
        }

    def run(
        self,
        title: str,
        begin: Callable[[], object] = nothing,
        end: Callable[[], object] = nothing,
        calm_s: float | None = None,
        num_clients: int = 1,
    ) -> float:
        """All requests, their answers checked; the median of their times."""
        answers = expected()
        events = {FAULT_BEGINS: begin, FAULT_ENDS: end}

        def ask(number: int) -> tuple[bool, float]:
            events.get(number, nothing)()
            started = time.perf_counter()
            answer = self.engine.generate(REQUESTS[number], NUM_NEW).token_ids
            time_s = time.perf_counter() - started
            self.check_memory()
            return answer == answers[number], time_s

        with ThreadPoolExecutor(num_clients) as clients:
            outcomes = list(clients.map(ask, range(NUM_REQUESTS)))
        right, times_s = sum(right for right, _ in outcomes), [time_s for _, time_s in outcomes]
        self.longest_s = max(times_s)
        self.tell(title, times_s, right, calm_s)
        assert right == NUM_REQUESTS
        return statistics.median(times_s)

    def tell(self, title: str, times_s: list[float], right: int, calm_s: float | None) -> None:
        during_s = times_s[FAULT_BEGINS:FAULT_ENDS]
        usual_s = statistics.median(times_s) if calm_s is None else calm_s
        num_slow = sum(time_s > usual_s + DEADLINE_MS / 2e3 for time_s in times_s)
        counts = ", ".join(f"{name} {count}" for name, count in self.stats().items() if count)
        print(  # noqa: T201
            f"{title}: {right}/{NUM_REQUESTS} right; without fault {1e3 * usual_s:.1f} ms, median "
            f"{1e3 * statistics.median(times_s):.1f} (during the fault "
            f"{1e3 * statistics.median(during_s):.1f}), max {1e3 * max(times_s):.0f} ms, "
            f"{num_slow} slow, {sum(times_s):.1f} s in all; {counts}"
        )

    def check_memory(self) -> None:
        stats = self.engine.cache_stats()
        assert stats["hot_memory_mb"] <= stats["budget_mb"]

    def comes_back(self) -> None:
        """What is new is written again, and what memory lost comes from below again."""
        before = self.stats()
        wait_until(self._is_used_since(before))

    def _is_used_since(self, before: dict[str, Any]) -> Callable[[], bool]:
        def is_used() -> bool:
            self._num_new += 6
            prompts = [words(100, seed=1000 + self._num_new + each) for each in range(6)]
            answers = []
            for prompt in prompts:
                answers.append(self.engine.generate(prompt, NUM_NEW).token_ids)
                self.engine.flush()
            assert [self.engine.generate(p, NUM_NEW).token_ids for p in prompts] == answers
            now = self.stats()
            return now["written"] > before["written"] and now["hits"] > before["hits"]

        return is_used


@contextmanager
def trial(tier: str, **options: Any) -> Iterator[Trial]:
    """An engine that leaves nothing behind: no thread, and no chunk that may not leave memory."""
    threads = set(threading.enumerate())
    options = {"max_cache_bytes": small_memory_bytes(), "tier_deadline_ms": DEADLINE_MS} | options
    with engine_of(**options) as engine:
        yield Trial(engine, tier)
        engine.flush()
        memory = engine._parts.store.tiers.memory
        assert not memory._holds and not memory._on_hold_bytes
    left = [each for each in threading.enumerate() if each not in threads]
    assert [each.name for each in left if each.name.startswith("kvboost")] == []
