"""Real files on disks that are slow or hang (FUSE): what came is used, and nobody else waits."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from fakes import WordTokenizer, words
from fuse_disk import FuseDisk, fuse_disk
from kvboost import KVBoost
from kvboost.codecs.frame import write
from kvboost.codecs.raw import RawCodec
from kvboost.core import Entry, FrameKey, KVGeometry, Namespace, PlaneGroup, PrefixKey, Provenance
from kvboost.metrics import Metrics
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.guarded import Patience
from kvboost.tiers.host import HostFrames
from kvboost.tiers.memory import MemoryTier
from kvboost.tiers.stack import Opener, TierStack
from tiny_models import SUPPORTED, build

pytestmark = [pytest.mark.servers, pytest.mark.alone]

log = logging.getLogger(__name__)

GEOMETRY = KVGeometry(8, (PlaneGroup(tuple(range(16)), 8, 128),), "float32", 4)  # 64 KB a token
CHUNK_TOKENS = 64  # so a frame has 4 MB
NUM_FRAMES = 8


def fill(folder: Path) -> list[FrameKey]:
    """Frames of 4 MB in a folder, of which nothing is cached when it is opened again."""
    tier, keys = DiskTier(folder, 256 << 20), []
    kv = [torch.randn(16, 8, CHUNK_TOKENS, 128)]
    for number in range(NUM_FRAMES):
        key = PrefixKey(sha256(b"%d" % number).digest())
        tokens = number.to_bytes(4, "little") * CHUNK_TOKENS
        entry = Entry(tokens, Provenance.EXACT, key, None, None, 0, Namespace(bytes(32)))
        tier.put({key: write(entry, kv, RawCodec(GEOMETRY))})
        keys.append(key)
    tier.close()
    return keys


@contextmanager
def stack_on(folder: Path, deadline_s: float) -> Iterator[TierStack]:
    stack = TierStack(MemoryTier(8 << 20), HostFrames(RawCodec(GEOMETRY)), Metrics(), deadline_s)
    stack.add_below(Opener("disk", lambda: DiskTier(folder, 256 << 20)), lambda _: iter(()))
    yield stack
    stack.close()


@pytest.mark.alone
def test_a_slow_disk_is_waited_for_while_it_is_faster_than_the_model(tmp_path: Path) -> None:
    """A frame takes 1.6 s of it: longer than the deadline, which is for silence."""
    with fuse_disk(tmp_path, bytes_per_s=2.5e6) as disk:
        keys = fill(disk.folder / "kv")[:3]
        with stack_on(disk.folder / "kv", deadline_s=1.2) as stack:
            found = stack.get(keys, Patience(1.2, 1.2, least_bytes_per_s=1e6))
            assert set(found) == set(keys)
            assert stack.stats()["disk"]["is_up"] and not stack.stats()["disk"]["faults"]


def test_what_a_slow_disk_delivered_in_time_is_used(tmp_path: Path) -> None:
    with fuse_disk(tmp_path, bytes_per_s=8e6) as disk:
        keys = fill(disk.folder / "kv")
        with stack_on(disk.folder / "kv", deadline_s=2.0) as stack:
            found = stack.get(keys, Patience(2.0, 2.0, least_bytes_per_s=1e12))
            assert 0 < len(found) < NUM_FRAMES
            assert list(found) == keys[: len(found)]
            assert stack.stats()["disk"]["is_up"] and not stack.stats()["disk"]["faults"]


def test_a_disk_slower_than_the_model_is_not_read_once_that_is_known(tmp_path: Path) -> None:
    with fuse_disk(tmp_path, bytes_per_s=20e6) as disk:
        keys = fill(disk.folder / "kv")
        with stack_on(disk.folder / "kv", deadline_s=2.0) as stack:
            guarded, num_bytes = stack._below[0], 4 * NUM_FRAMES << 20
            assert len(stack.get(keys, stack.patience(num_bytes, compute_s=0.1))) < NUM_FRAMES
            while guarded._began_at is not None:  # a batch may still be under way
                time.sleep(0.01)
            bytes_read = guarded.tier.bytes_read
            for _ in range(20):
                assert stack.get(keys, stack.patience(num_bytes, compute_s=0.1)) == {}
            assert guarded.tier.bytes_read == bytes_read
            assert len(stack.get(keys, stack.patience(num_bytes, compute_s=10))) == NUM_FRAMES
            assert stack.stats()["disk"]["is_up"] and not stack.stats()["disk"]["faults"]


def test_a_disk_that_hangs_stops_no_other_thread_and_comes_back(tmp_path: Path) -> None:
    with fuse_disk(tmp_path) as disk:
        keys = fill(disk.folder / "kv")
        with stack_on(disk.folder / "kv", deadline_s=2.0) as stack:
            disk.hang()
            ticks, stop = [], threading.Event()
            ticker = threading.Thread(target=_tick, args=(ticks, stop))
            ticker.start()
            assert stack.get(keys) == {}
            stop.set()
            ticker.join()
            assert max(ticks) < 1.0  # of a deadline in which nothing at all would run
            assert not stack.stats()["disk"]["is_up"]
            disk.go_on()
            until = time.monotonic() + 20
            while not stack.stats()["disk"]["is_up"]:
                assert time.monotonic() < until
                time.sleep(0.01)
            assert set(stack.get(keys)) == set(keys)


def _tick(gaps: list[float], stop: threading.Event) -> None:
    before = time.monotonic()
    while not stop.is_set():
        time.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - before)
        before = now


def seconds_of_others(engine: KVBoost, num_requests: int, beside: list[list[int]]) -> list[float]:
    """Seconds of each answer that needs nothing from the disk, while other prompts are answered."""
    tickets = [engine.submit(prompt) for prompt in beside]
    seconds = []
    for number in range(num_requests):
        started = time.perf_counter()
        engine.generate(words(40, 1000 + number), 8, tenant="other")
        seconds.append(time.perf_counter() - started)
    assert all(ticket.result(30).text for ticket in tickets)
    return seconds


def test_requests_that_need_a_hung_disk_hold_up_no_others(tmp_path: Path) -> None:
    def engine_on(disk: FuseDisk) -> KVBoost:
        model = build(*SUPPORTED["llama"])
        folder = str(disk.folder / "kv")
        return KVBoost(
            model,
            WordTokenizer(),
            chunk_size=16,
            disk_cache_dir=folder,
            max_disk_bytes=16 << 20,
            tier_deadline_ms=3000,
        )

    prompts = [words(200, seed) for seed in range(4)]
    with fuse_disk(tmp_path) as disk:
        with engine_on(disk) as engine:
            for prompt in prompts:
                engine.generate(prompt, 1)
            engine.flush()
        with engine_on(disk) as engine:
            assert engine.explain(prompts[0]).spans[0].kind.value == "exact"
            usual = seconds_of_others(engine, 60, beside=[words(200, seed) for seed in range(4, 8)])
            disk.hang()
            beside = seconds_of_others(engine, 60, beside=prompts)
            disk.go_on()
    ratio = statistics.quantiles(beside, n=20)[-1] / statistics.quantiles(usual, n=20)[-1]
    log.info("p95 of other requests beside a hung disk: %.2f of the usual", ratio)
    assert statistics.median(beside) < 2 * statistics.median(usual)
    assert max(beside) < 1.5  # of a deadline of 3 for which the engine's thread would wait
