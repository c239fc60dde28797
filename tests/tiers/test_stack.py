"""Memory on top of tiers that fail, hang, lose and spoil: a fault is a miss, and passes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fakes import GEOMETRY, FakeSlots, FaultyDisk, FaultyTier, store_of
from kvboost.codecs.frame import Head
from kvboost.core import FrameKey, Owner, PrefixKey
from kvboost.errors import TierUnavailable
from kvboost.metrics import Metrics
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.store import commit
from kvboost.tiers import guarded
from kvboost.tiers import store as store_module
from kvboost.tiers.base import StoredChunk, Tier
from kvboost.tiers.behind import FIRST_PAUSE_S, WriteBehind
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.guarded import PROBE
from kvboost.tiers.stack import Opener
from kvboost.tiers.store import ChunkStore
from waiting import at_once, wait_until

SPACE = namespace(b"model", "", None)
SIZE = 8
FRAME_BYTES = SIZE * GEOMETRY.bytes_per_token + 320


def keys_of(tokens: list[int]) -> list[FrameKey]:
    return [key.prefix for key in derive(split(tokens, SIZE), SPACE)]


def keep(store: ChunkStore, tokens: list[int]) -> list[FrameKey]:
    chunks = split(tokens, SIZE)
    commit(FakeSlots(len(tokens)), chunks, derive(chunks, SPACE), SPACE, store)
    return keys_of(tokens)


@contextmanager
def opened(*below: Tier, **options: float) -> Iterator[ChunkStore]:
    store = store_of(below=below, **options)
    try:
        yield store
    finally:
        for tier in below:
            tier.thawed.set()
        store.tiers.close()


def fetch(store: ChunkStore, keys: list[FrameKey]) -> dict[FrameKey, StoredChunk]:
    """As a request does it: first from shared tiers into memory, then all."""
    store.prefetch(keys, store.tiers.patience())
    return store.tiers.get(keys)


def test_what_is_stored_goes_below_and_comes_up_elsewhere() -> None:
    shared = FaultyTier()
    with opened(shared) as first, opened(shared) as second:
        keys = keep(first, list(range(40)))
        assert first.tiers.flush(5)
        assert set(keys) <= set(shared.frames)
        assert second.index.get(keys[0]) is None
        second.prefetch(keys, second.tiers.patience(), in_order=True)
        assert all(second.tiers.memory.holds(key) for key in keys)
        assert second.index.get(keys[1]) == first.index.get(keys[1])
        assert second.metrics.snapshot()["loaded_chunks"] == 5


@pytest.mark.parametrize(
    ("below", "is_shared"),
    [((), False), ((FaultyDisk,), False), ((FaultyTier,), True), ((FaultyDisk, FaultyTier), True)],
)
def test_others_may_have_stored_more_where_a_tier_is_not_our_own(
    below: Sequence[type[FaultyTier]], is_shared: bool
) -> None:
    with opened(*(kind() for kind in below)) as store:
        assert store.tiers.is_shared == is_shared


def test_asking_in_order_stops_at_the_first_gap() -> None:
    shared = FaultyTier()
    with opened(shared) as first, opened(shared) as second:
        keys = keep(first, list(range(400)))
        first.tiers.flush(5)
        del shared.frames[keys[0]]
        second.prefetch(keys, second.tiers.patience(), in_order=True)
        assert len(second.index) == 0
        second.prefetch(keys[1:], second.tiers.patience(), in_order=True)
        assert len(second.index) == len(keys) - 1


def test_of_a_prompt_that_memory_cannot_hold_the_beginning_is_loaded() -> None:
    shared = FaultyTier()
    keys = filled(shared, list(range(160)))
    with opened(shared, budget_bytes=10 * FRAME_BYTES) as store:
        store.prefetch(keys, store.tiers.patience(), in_order=True)
        held = [store.tiers.memory.holds(key) for key in keys]
        assert sum(held) >= 5 and held == sorted(held, reverse=True)
        assert len(store.index) == sum(held)


def test_loading_the_rest_of_a_prompt_does_not_evict_its_start() -> None:
    shared = FaultyTier()
    keys = filled(shared, list(range(64)))
    with opened(shared, budget_bytes=10 * FRAME_BYTES) as store:
        store.prefetch(keys[:4], store.tiers.patience(), in_order=True)
        others = keep(store, list(range(1000, 1040)))
        assert store.tiers.flush(5)  # writing holds chunks, too
        assert all(store.tiers.memory.holds(key) for key in [*keys[:4], *others])
        store.prefetch(keys, store.tiers.patience(), in_order=True)
        assert all(store.tiers.memory.holds(key) for key in keys)


def test_text_of_others_is_found_by_its_words() -> None:
    shared, document = FaultyTier(), list(range(1000, 1400))
    with opened(shared) as first, opened(shared) as second:
        keep(first, document)
        first.tiers.flush(5)
        prompt = np.array([*range(50), *document, 5], dtype="<u4")
        assert not second.index.knows(prompt, SPACE)
        second.prefetch_moved(prompt, SPACE, second.tiers.patience())
        assert second.index.knows(prompt, SPACE)
        assert len(second.index) >= 4  # about one anchor in 32 tokens, each leads to a chunk
        other = namespace(b"model", "somebody else", None)
        third = store_of(below=[shared])
        third.prefetch_moved(prompt, other, third.tiers.patience())
        assert len(third.index) == 0
        third.tiers.close()


def filled(tier: FaultyTier, tokens: list[int]) -> list[FrameKey]:
    """Have another process store something."""
    with opened(tier) as store:
        keys = keep(store, tokens)
        assert store.tiers.flush(5)
    tier.thawed.clear()
    return keys


def frames_of(tokens: list[int]) -> dict[FrameKey, bytes]:
    disk = FaultyDisk()
    filled(disk, tokens)
    return disk.frames


@pytest.mark.parametrize("fault", ["down", "lost", "truncated", "corrupted", "frozen"])
@pytest.mark.parametrize("kind", [FaultyTier, FaultyDisk])
def test_a_fault_below_is_a_miss_and_passes(fault: str, kind: type[FaultyTier]) -> None:
    below = kind()
    keys = filled(below, list(range(40)))
    with opened(below, deadline_s=0.2) as store:
        assert len(fetch(store, keys)) == 5
        assert store.tiers.memory.stats().num_entries == 5
        store.tiers.memory.discard(keys)
        below.fault = fault
        assert fetch(store, keys) == {}
        counts = store.metrics.snapshot()
        assert (counts["tier_faults"] > 0) == (fault in ("down", "frozen"))
        assert (counts["damaged_frames"] > 0) == (fault in ("truncated", "corrupted"))
        below.fault = ""
        below.thawed.set()
        if fault in ("truncated", "corrupted"):
            assert store.tiers.flush(5)
            assert below.num_chunks < 5  # dropped, to be stored again
        else:
            wait_until(lambda: len(fetch(store, keys)) == 5)


class RatedDisk(FaultyDisk):
    """Delivers so many bytes in a second, one frame after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_s = math.inf
        self.asked: list[FrameKey] = []

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        found = super().get(keys)
        self.asked += found
        for frame in found.values():
            time.sleep(frame.nbytes / self.bytes_per_s)
            self.bytes_read += frame.nbytes
        return found


class RatedServer(RatedDisk, FaultyTier):
    """The same as a tier that others write, too."""


@pytest.mark.parametrize("kind", [RatedDisk, RatedServer])
def test_a_tier_that_is_slower_than_the_model_is_asked_for_a_batch_now_and_then(
    kind: type[RatedDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "LEAST_TIMED_BYTES", 1)
    monkeypatch.setattr(guarded, "RATE_PROBE_S", 1e9)
    disk = kind()
    keys = filled(disk, list(range(80)))
    num_bytes = sum(len(disk.frames[key]) for key in keys)

    def num_loaded(store: ChunkStore) -> tuple[int, int]:
        """Chunks that came, and that were asked for, where computing takes half a second."""
        wait_until(lambda: store.tiers._below[0]._began_at is None)
        store.tiers.memory.discard(keys)
        disk.asked.clear()
        patience = store.tiers.patience(num_bytes, compute_s=0.5)
        store.prefetch(keys, patience, in_order=True)
        return len(store.tiers.get(keys, patience)), len(disk.asked)

    with opened(disk) as store:
        assert num_loaded(store) == (10, 10)
        disk.bytes_per_s = num_bytes / 5
        assert num_loaded(store)[0] < 10  # patience ends
        assert num_loaded(store) == num_loaded(store) == (0, 0)  # known by now
        disk.bytes_per_s = math.inf
        assert num_loaded(store) == (0, 0)
        tier = store.tiers._below[0]
        tier._probe_at = 1.0  # long ago
        patience = store.tiers.patience(num_bytes, compute_s=0.5)
        assert not tier.get(keys_of([7]), patience, lambda *_: None)
        assert tier._probe_at < 1e9  # nothing found, nothing learned: tried again soon

        def recovered() -> bool:
            """Whether a probe finds the disk fast; one that a busy machine stalls does not."""
            tier._probe_at = 1.0
            return num_loaded(store) == num_loaded(store) == (10, 10)

        wait_until(recovered)


def test_a_busy_tier_is_waited_for_in_proportion_to_what_it_saves() -> None:
    with opened(FaultyDisk(), deadline_s=0.5) as store:
        seconds = [store.tiers.patience(1000, compute_s).left_s for compute_s in (0.2, 1, 10, 100)]
        assert seconds == pytest.approx([0.2, 0.5, 2.5, 25], abs=0.1)


class LongDisk(FaultyDisk):
    """Has so much that reading what it is takes a while."""

    may_finish = threading.Event()

    def heads(self) -> Iterator[Head]:
        for head in super().heads():
            self.may_finish.wait(0.1)
            yield head


def test_a_disk_is_used_while_what_it_has_is_still_being_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "ADOPTED_AT_ONCE", 1)
    disk, store = LongDisk(), store_of()
    disk.frames = dict(frames_of(list(range(400))))
    keys = list(disk.frames)
    store.tiers.add_below(Opener("disk", lambda: disk, patience_s=0.0), store.adopt)
    wait_until(lambda: len(store.index) > 0)
    assert set(store.tiers.get(keys[:3])) == set(keys[:3])
    assert len(store.index) < len(keys)
    del disk.frames[keys[-1]]
    disk.may_finish.set()
    wait_until(lambda: len(store.index) == len(keys) - 1)
    store.tiers.close()


class LateDisk(FaultyDisk):
    """Discards when it is told to, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.may_discard = threading.Event()

    def discard(self, keys: Iterable[FrameKey]) -> None:
        assert self.may_discard.wait(20)
        super().discard(keys)


def test_a_damaged_chunk_is_stored_again() -> None:
    disk = LateDisk()
    keys = filled(disk, list(range(40)))
    with opened(disk) as store:
        disk.fault = "corrupted"
        lost = [key for key in keys if key not in store.tiers.get(keys)]
        assert lost == keys
        store.forget(lost)
        assert len(store.index) == 0
        keep(store, list(range(40)))  # before the damaged ones are gone
        disk.fault = ""
        disk.may_discard.set()
        assert store.tiers.flush(5)
        assert len(store.index) == store.tiers.memory.stats().num_entries == disk.num_chunks == 5


def test_a_frozen_tier_costs_its_deadline_once() -> None:
    below = FaultyTier()
    with opened(below, deadline_s=0.1) as store:
        below.fault = "frozen"
        waits = []
        for number in range(20):
            started = time.monotonic()
            assert fetch(store, keys_of(list(range(number, number + 8)))) == {}
            waits.append(time.monotonic() - started)
        assert store.metrics.snapshot()["tier_faults"] == 1
        assert not store.tiers.stats()["faulty-0"]["is_up"]
        assert waits[0] > 0.09


def test_what_waits_to_be_written_stays_within_the_budget() -> None:
    below = FaultyTier()
    with opened(below, budget_bytes=4 * FRAME_BYTES, deadline_s=0.1) as store:
        below.fault = "frozen"
        for number in range(20):
            keep(store, [number] * 8)
            assert store.tiers.memory.stats().size_bytes <= 4 * FRAME_BYTES
        assert store.tiers.memory.stats().num_entries == len(store.index) == 4
        assert store.metrics.snapshot()["dropped_writes"] == 18
        below.fault = ""
        below.thawed.set()
        assert store.tiers.flush(5)
        assert below.num_chunks == 2  # half of memory may wait
        last = keep(store, [99] * 8)[0]
        assert store.tiers.flush(5) and last in below.frames


def test_what_memory_evicts_is_still_found_on_disk() -> None:
    disk = FaultyDisk()
    keys = filled(disk, list(range(80)))
    with opened(disk, budget_bytes=3 * FRAME_BYTES) as store:
        for number in range(5):
            keep(store, [500 + number] * 8)
            store.tiers.flush(5)
        store.settle()
        assert all(store.index.get(key) is not None for key in keys)
        assert set(store.tiers.get(keys)) == set(keys)


def test_all_that_is_new_reaches_a_disk_below_a_memory_that_would_refuse_it() -> None:
    disk = FaultyDisk()
    with opened(disk, budget_bytes=4 * FRAME_BYTES) as store:
        hot = []
        for first in (0, 50):  # half of memory may wait to be written
            hot += keep(store, list(range(first, first + 16)))
            assert store.tiers.flush(5)
        for number in range(100, 130):
            for _ in range(20):
                store.tiers.get(hot)
            keep(store, [number] * 8)
            assert store.tiers.flush(5)
            store.tiers.memory.admit(store.tiers.get(hot))
        assert disk.num_chunks == 34 == len(store.index)


def test_a_chunk_that_has_left_is_not_learned() -> None:
    shared = FaultyTier()
    keys = filled(shared, list(range(8)))
    with opened() as store:
        store._learn(store.tiers.medium.from_frame(memoryview(shared.frames[keys[0]])))
        assert len(store.index) == 0


def test_a_tier_that_cannot_be_opened_is_tried_again() -> None:
    shared, attempts = FaultyTier(), []
    store = store_of()

    def make() -> Tier:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("not yet")
        return shared

    store.tiers.add_below(Opener("late", make), store.adopt)
    assert fetch(store, keys_of([1] * 8)) == {}
    wait_until(lambda: store.tiers.stats()["late"]["is_up"])
    assert len(attempts) == 3
    keys = keep(store, list(range(8)))
    store.tiers.flush(5)
    assert keys[0] in shared.frames
    store.tiers.close()


def test_a_disk_that_failed_does_not_keep_chunks_out_of_memory() -> None:
    disk = FaultyDisk()
    with opened(disk, budget_bytes=2 * FRAME_BYTES, deadline_s=0.1) as store:
        first = keep(store, list(range(8)))
        store.tiers.flush(5)
        for number in range(3):
            keep(store, [500 + number] * 8)
            store.tiers.flush(5)
        assert not store.tiers.memory.holds(first[0])
        disk.fault = "down"
        assert store.tiers.get(first) == {}
        store.forget(first)
        assert store.index.get(first[0]) is not None  # the disk has it, only not now
        keep(store, list(range(8)))
        assert store.tiers.memory.holds(first[0])


def test_discarded_chunks_leave_every_tier() -> None:
    disk, shared = FaultyDisk(), FaultyTier()
    with opened(disk, shared) as store:
        keys = keep(store, list(range(20)))
        assert store.tiers.discard(keys[-1])
        store.tiers.flush(5)
        assert keys[-1] not in disk.frames and keys[-1] not in shared.frames
        assert keys[0] in disk.frames and keys[0] in shared.frames


def test_eight_threads_load_and_store_within_the_budget() -> None:
    with opened(FaultyTier(), budget_bytes=10 * FRAME_BYTES) as store:

        def work(seed: int) -> None:
            for step in range(40):
                tokens = [(seed * step) % 17] * 24
                store.prefetch(keys_of(tokens), store.tiers.patience(), in_order=True)
                keep(store, tokens)
                assert store.tiers.memory.stats().size_bytes <= 10 * FRAME_BYTES

        at_once(work, range(1, 9))
        store.settle()
        assert len(store.index) == store.tiers.memory.stats().num_entries


def test_a_breaker_that_opens_while_the_tier_is_idle_closes_again() -> None:
    """As when an answer comes just after its deadline: nobody asks for anything then."""
    with opened(FaultyTier()) as store:
        guarded = store.tiers._below[0]
        time.sleep(0.05)  # its thread waits for a job
        guarded._fail(TierUnavailable("no answer in time"))
        assert guarded.tier is None
        wait_until(lambda: guarded.tier is not None)


def test_a_request_waits_for_a_slow_tier_no_longer_than_the_deadline() -> None:
    class SlowTier(FaultyTier):
        num_waits = 0

        def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
            if keys[0] != PROBE:
                self.num_waits += 1
                time.sleep(0.15)
            return super().get(keys)

    slow = SlowTier()
    with opened(slow, deadline_s=0.2) as store:
        keys = derive(split(list(range(40)), SIZE), SPACE)
        store.prefetch_prefix(keys, store.tiers.patience())
        assert slow.num_waits == 1  # and the notes were not asked for


class Nowhere:
    """A source of frames that nobody misses."""

    def take(self, key: FrameKey) -> memoryview:
        return memoryview(key)

    def written(self, key: FrameKey) -> None:
        pass

    def left(self, keys: Sequence[FrameKey]) -> None:
        pass


def write(behind: WriteBehind, name: bytes) -> None:
    behind.put(PrefixKey(name))
    assert behind.flush(5)


def test_a_tier_that_goes_on_failing_is_written_to_less_and_less_often() -> None:
    below, errors = FaultyTier(), []
    behind = WriteBehind(
        "test", lambda: below, Nowhere(), errors.append, lambda keys: None, Metrics()
    )
    below.fault = "down"
    for _ in range(3):
        behind._again_at = 0.0
        write(behind, b"tried")
        write(behind, b"dropped at once")
    assert len(errors) == 3 and behind.num_dropped == 6
    assert behind._pause_s == 8 * FIRST_PAUSE_S
    below.fault, behind._again_at = "", 0.0
    write(behind, b"written")
    assert behind._pause_s == FIRST_PAUSE_S and behind.num_written == 1
    assert behind.close(5)


def test_what_a_full_tier_refuses_is_counted_as_dropped() -> None:
    class FullTier(FaultyTier):
        def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
            return [PrefixKey(b"older"), *frames]

    below = FullTier()
    behind = WriteBehind(
        "test", lambda: below, Nowhere(), lambda error: None, lambda keys: None, Metrics()
    )
    write(behind, b"refused")
    assert (behind.num_written, behind.num_dropped) == (0, 1)
    assert behind.close(5)


def test_a_chunk_that_cannot_be_read_costs_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = FaultyTier()
    with opened(shared) as store:
        take, failures = store.tiers.take, [MemoryError("no memory for a frame")]

        def fails_once(key: FrameKey) -> memoryview | None:
            if failures:
                raise failures.pop()
            return take(key)

        monkeypatch.setattr(store.tiers, "take", fails_once)
        keep(store, list(range(80)))
        assert store.tiers.flush(5)
        stats = store.tiers.stats()["faulty-0"]
        assert (stats["written"], stats["dropped"], stats["faults"]) == (9, 1, 0)
        assert store.tiers.memory._holds == {}


@pytest.mark.parametrize("is_erased_first", [True, False])
def test_what_is_deleted_while_it_is_loaded_stays_deleted(
    monkeypatch: pytest.MonkeyPatch, *, is_erased_first: bool
) -> None:
    shared = FaultyTier()
    keys = filled(shared, list(range(80)))
    is_reading, goes_on, goes_on_erasing = (threading.Event() for _ in range(3))
    with opened(shared) as store:
        load, erase = store.tiers.medium.from_frame, shared.erase

        def from_frame(frame: memoryview) -> StoredChunk:
            is_reading.set()
            assert goes_on.wait(5)
            return load(frame)

        def erased(keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
            assert goes_on_erasing.wait(5)
            erase(keys, owners)

        monkeypatch.setattr(store.tiers.medium, "from_frame", from_frame)
        monkeypatch.setattr(shared, "erase", erased)
        loading = threading.Thread(target=store.prefetch, args=(keys, store.tiers.patience()))
        if is_erased_first:  # memory, but not the tier
            store.delete(keys)
        loading.start()
        assert is_reading.wait(5)
        if not is_erased_first:
            store.delete(keys)
        goes_on.set()
        loading.join(5)
        goes_on_erasing.set()
        assert store.tiers.not_erased(5) == []
        store.settle()
        assert not any(store.tiers.memory.holds(key) for key in keys)
        assert not any(store.index.get(key) for key in keys)
        assert shared.num_chunks == 0


def test_deletions_of_other_text_stop_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = FaultyTier()
    keys = filled(shared, list(range(80)))
    with opened(shared) as store:
        load = store.tiers.medium.from_frame

        def from_frame(frame: memoryview) -> StoredChunk:
            store.delete([PrefixKey(b"other".ljust(32))])
            return load(frame)

        monkeypatch.setattr(store.tiers.medium, "from_frame", from_frame)
        assert len(fetch(store, keys)) == len(keys)


@pytest.mark.parametrize("everything", [False, True])
def test_what_a_tier_has_not_erased_yet_is_not_loaded_from_it(
    monkeypatch: pytest.MonkeyPatch, *, everything: bool
) -> None:
    shared = FaultyTier()
    keys = filled(shared, list(range(80)))
    with opened(shared) as store:
        erase, goes_on = shared.erase, threading.Event()
        monkeypatch.setattr(shared, "erase", lambda *whose: goes_on.wait(5) and erase(*whose))
        if everything:  # of which this process knows nothing
            store.delete_all("", store.tiers.patience())
        else:
            fetch(store, keys)
            store.delete(keys)
        store.prefetch(keys, store.tiers.patience())
        assert store.tiers.pin(keys, None) == []
        goes_on.set()
        assert store.tiers.not_erased(5) == [] and store.tiers.get(keys) == {}
        assert shared.num_chunks == 0


def test_a_disk_that_opens_late_is_told_of_a_deletion_elsewhere(tmp_path: Path) -> None:
    shared, tokens, is_locked = FaultyTier(), list(range(80)), [False]
    chunks, space = split(tokens, SIZE), namespace(b"model", "alice", None)

    def open_disk() -> Tier:
        if is_locked:
            raise TierUnavailable("in use")
        return DiskTier(tmp_path, 8 << 20)

    @contextmanager
    def with_disk() -> Iterator[ChunkStore]:
        store = store_of()
        store.tiers.add_below(Opener("disk", open_disk, 0.5), store.adopt)
        store.tiers.add_below(Opener("redis", lambda: shared), store.adopt)
        yield store
        store.tiers.close()

    is_locked.clear()
    with with_disk() as store:
        commit(FakeSlots(80), chunks, derive(chunks, space), space, store)
        assert store.tiers.flush(5)
    with opened(shared) as elsewhere:
        elsewhere.delete_all("alice", elsewhere.tiers.patience())
        assert elsewhere.tiers.not_erased(5) == []
    is_locked.append(True)
    with with_disk() as store:
        store.refresh("alice", store.tiers.patience())
        is_locked.clear()
        wait_until(lambda: store.tiers.stats()["disk"]["is_up"])
        assert store.tiers.not_erased(5) == []
        assert store.tiers.stats()["disk"]["num_entries"] == 0


def test_what_was_stored_after_a_deletion_elsewhere_is_erased_once_that_is_known() -> None:
    shared, tokens = FaultyTier(), list(range(80))
    with opened(shared) as deleting, opened(shared) as storing:
        before = namespace(b"model", "alice", None)
        deleting.delete_all("alice", deleting.tiers.patience())
        assert deleting.tiers.not_erased(5) == []
        chunks = split(tokens, SIZE)
        commit(FakeSlots(80), chunks, derive(chunks, before), before, storing)
        assert storing.tiers.flush(5) and shared.num_chunks == 10
        storing.refresh("alice", storing.tiers.patience())
        assert storing.epochs.of("alice") == 1
        assert storing.tiers.not_erased(5) == [] and shared.num_chunks == 0
