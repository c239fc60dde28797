"""Stored K/V stays in the pool: storing and exact hits copy nothing; room comes from eviction."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from batching import ENDLESS, WAIT_S, engine_of, greedy
from fakes import words
from kvboost.core import MatchKind, Span
from kvboost.engine.prefill import Terms, prefetch
from kvboost.models.pool import BlockPool
from kvboost.models.rows import Rows

pytestmark = pytest.mark.tiny


@contextmanager
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each copy of K/V into a pool has."""
    made: list[int] = []
    write = BlockPool.write

    def count(self: BlockPool, rows: Any, kv: Any) -> None:
        made.append(sum(stop - start for start, stop in rows))
        write(self, rows, kv)

    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "write", count)
        yield made


def test_storing_and_exact_hits_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = words(400, seed=1)
    with engine_of() as engine, copies(monkeypatch) as made:
        cold = engine.generate(prompt, 4)
        engine.flush()
        stored = engine.cache_stats()["hot_chunks"]
        warm = engine.generate(prompt, 4)
        beside = engine.submit([*prompt, 9], greedy(4)).result(WAIT_S)
        assert stored > 0 and made == []
        assert warm.token_ids == cold.token_ids and warm.cached_tokens == 399
        assert beside.cached_tokens == 400


def test_a_prompt_is_there_for_others_before_its_output_ends() -> None:
    prompt, begun = words(300, seed=2), threading.Event()
    with engine_of() as engine:
        first = engine.submit(prompt, ENDLESS, listener=lambda _: begun.set())
        assert begun.wait(WAIT_S)
        assert engine.explain([*prompt, 7]).tokens(MatchKind.EXACT) == 300
        assert not first.future.done()
        first.cancel()


def test_a_running_request_takes_the_room_of_stored_chunks() -> None:
    with engine_of(num_blocks=40, block_size=16) as engine:  # 640 tokens
        for seed in range(4):
            engine.submit(words(300, seed=seed), greedy(4)).result(WAIT_S)
        engine.flush()
        stats = engine._parts.pool.stats()
        assert stats["free_blocks"] + stats["cached_blocks"] == 40
        large = engine.submit(words(600, seed=9), greedy(8)).result(WAIT_S)
        assert len(large.token_ids) == 8
        assert engine.cache_stats()["evicted_chunks"] > 0


def test_a_request_runs_although_the_pool_is_full_of_pins() -> None:
    with engine_of(num_blocks=24, block_size=16) as engine:
        pinned = words(320, seed=1)
        engine.warm(pinned, pin=True)
        answer = engine.submit(words(200, seed=2), greedy(4)).result(WAIT_S)
        assert len(answer.token_ids) == 4
        assert engine.generate([*pinned, 5], 1).cached_tokens == 320


def test_chunks_of_a_running_request_that_wait_to_be_written_are_counted_once() -> None:
    prompt, begun = words(300, seed=2), threading.Event()
    with engine_of(num_blocks=40, block_size=16) as engine:
        first = engine.submit(prompt, greedy(300), listener=lambda _: begun.set())
        assert begun.wait(WAIT_S)
        memory, batch = engine._parts.store.tiers.memory, engine._front._batch
        running = [(each.rows, each.num_reserved) for each in batch._running]
        before = engine._parts.pool.room(running)
        assert sum(map(memory.hold, list(memory._chunks))) > 10
        assert engine._parts.pool.room(running) >= before - 16
        assert engine._parts.pool.room([]) < 640 - 160
        first.cancel()


def test_a_chunk_that_is_read_outlives_its_eviction() -> None:
    with engine_of() as engine:
        engine.generate(words(256, seed=3), 1)
        engine.flush()
        parts = engine._parts
        memory, pool = parts.store.tiers.memory, parts.pool
        key, chunk = next(iter(memory._chunks.items()))
        before = [part.clone() for part in chunk.kv()]
        memory.discard(list(memory._chunks))
        num_kept = pool.stats()["cached_blocks"]
        assert not memory.holds(key) and num_kept > 0
        taken = Rows(pool, (pool.num_free - 1) * pool.block_size)
        span = Span(0, taken.capacity)
        taken.write(span, [torch.full_like(part, 7) for part in taken.read(span)])
        assert all(map(torch.equal, chunk.kv(), before))
        taken.release()
        del chunk
        assert pool.stats()["cached_blocks"] == 0


def test_what_was_loaded_for_a_request_stays_until_it_is_used(tmp_path: Path) -> None:
    prompt = words(256, seed=4)
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        engine.generate(prompt, 1)
        engine.flush()
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        parts = engine._parts
        prefetched = prefetch(prompt, parts, Terms("exact"))
        assert len(prefetched.held) == 16
        parts.store.tiers.make_room(1 << 40)
        assert all(map(parts.store.tiers.memory.holds, prefetched.held))
        prefetched.release()
        parts.store.tiers.make_room(1 << 40)
        assert parts.store.tiers.memory.stats().num_entries == 0
