"""K/V on its way between the store and vLLM's blocks, and both sides together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fake_vllm import (
    AWAY,
    BLOCK_SIZE,
    CHUNK_SIZE,
    HOME,
    MODEL,
    OPTIONS,
    FakeRequest,
    FakeSparse,
    admit,
    changes_of,
    do,
    fill,
    load_of,
    rows_of,
    saved,
    scheduler_side,
    worker_side,
)
from fakes import FaultyDisk, FaultyTier, words
from kvboost.build import build_repairs
from kvboost.connectors.vllm import worker_side as worker_module
from kvboost.connectors.vllm.messages import Change, Prefetch, Report, Save, StepWork
from kvboost.connectors.vllm.scheduler_side import SchedulerSide
from kvboost.connectors.vllm.worker_side import WorkerSide
from kvboost.core import FrameKey, ReusePlan, Span
from kvboost.reuse.store import commit
from kvboost.tiers.epochs import epoch_key
from kvboost.tiers.stack import Opener
from kvboost.tiers.store import ChunkStore
from waiting import wait_until

PROMPT = words(100, seed=1)
LONGER = [*PROMPT, *words(8, seed=2)]  # finds all of the prompt
KEYS = [change.key for change in changes_of(PROMPT)]


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    worker = worker_side()
    yield worker
    worker.close()


OTHER = [*AWAY[8:12], *AWAY[7:8]]  # blocks that nothing was loaded into


def drop(worker: WorkerSide, key: FrameKey) -> None:
    worker._store.tiers.memory.discard([key])


@pytest.mark.parametrize("start", [0, 16, 48])
def test_rows_that_were_saved_are_loaded_into_other_blocks(worker: WorkerSide, start: int) -> None:
    rows = saved(worker, PROMPT)
    load = load_of(LONGER, PROMPT, start)
    assert (load.start, load.stop) == (start, len(PROMPT))
    assert do(worker, StepWork(loads=[load])) == (set(), {"loaded"})
    assert torch.equal(rows_of(worker, AWAY, Span(start, 100)), rows[:, :, start:])
    assert not rows_of(worker, AWAY, Span(0, max(start, 1)))[:, :, :start].any()
    assert worker.take_failed_blocks() == set()


def test_what_is_finished_is_told_once(worker: WorkerSide) -> None:
    saved(worker, PROMPT)
    work = StepWork(loads=[load_of(LONGER, PROMPT)])
    do(worker, work)
    assert worker.take_finished(work) == (set(), set())
    assert worker.take_finished(None) == (set(), set())


def test_a_save_amid_a_request_is_not_told(worker: WorkerSide) -> None:
    fill(worker, HOME, 100)
    work = StepWork(saves=[Save("r", PROMPT, "", HOME, is_last=False)])
    assert do(worker, work) == (set(), set())
    assert len(worker._store.index) == 4


def test_rows_from_before_a_deletion_are_not_stored(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(worker, HOME, 100)
    save = Save("r", PROMPT, "b", HOME, is_last=False)
    learn = partial(worker._store.epochs.learn, epoch_key("b"))

    def commit_late(*arguments: object) -> None:
        commit(*arguments)
        assert len(worker._store.index) == 4
        learn(1)

    monkeypatch.setattr(worker_module, "commit", commit_late)
    do(worker, StepWork(saves=[save]))
    assert len(worker._store.index) == 0
    do(worker, StepWork(saves=[save]))
    assert len(worker._store.index) == 0
    do(worker, StepWork(saves=[replace(save, epoch=1)]))
    assert len(worker._store.index) == 4


def test_rows_of_another_tenant_are_not_loaded(worker: WorkerSide) -> None:
    saved(worker, PROMPT, tenant="b")
    assert do(worker, StepWork(loads=[load_of(LONGER, PROMPT)])) == (set(), {"loaded"})
    assert worker.take_failed_blocks() == set(AWAY[:7])


def test_a_load_of_what_is_gone_fails_and_is_told(worker: WorkerSide) -> None:
    saved(worker, PROMPT)
    for key in KEYS:
        drop(worker, key)
    worker.take_report()
    assert do(worker, StepWork(loads=[load_of(LONGER, PROMPT)])) == (set(), {"loaded"})
    assert worker.take_failed_blocks() == set(AWAY[:7])
    assert worker.take_failed_blocks() == set()
    report = worker.take_report()
    assert report is not None and Change(KEYS[0]) in report.changes


@pytest.mark.parametrize(("lost", "first_failed"), [(1, 2), (2, 4), (3, 6)])
def test_a_load_fails_from_the_first_block_that_lacks_rows(
    worker: WorkerSide, lost: int, first_failed: int
) -> None:
    rows = saved(worker, PROMPT)
    drop(worker, KEYS[lost])
    assert do(worker, StepWork(loads=[load_of(LONGER, PROMPT)])) == (set(), {"loaded"})
    assert worker.take_failed_blocks() == set(AWAY[first_failed:7])
    assert worker._index.get(KEYS[lost]) is None
    stop = lost * CHUNK_SIZE
    assert torch.equal(rows_of(worker, AWAY, Span(0, stop)), rows[:, :, :stop])


def test_only_blocks_of_the_load_fail(worker: WorkerSide) -> None:
    load = load_of([*PROMPT[:40], *words(60)], PROMPT, start=16)
    assert load.stop == 40
    do(worker, StepWork(loads=[load]))
    assert worker.take_failed_blocks() == set(AWAY[1:3])


def test_a_block_that_is_filled_in_part_fails(worker: WorkerSide) -> None:
    saved(worker, PROMPT[:40])
    load = load_of(LONGER, PROMPT)
    key = changes_of(PROMPT[:40])[1].key
    plan = ReusePlan(len(LONGER), (load.plan.matches[0], replace(load.plan.matches[1], key=key)))
    plan = replace(plan, matches=(*plan.matches[:1], replace(plan.matches[1], span=Span(32, 40))))
    do(worker, StepWork(loads=[replace(load, plan=plan)]))
    assert worker.take_failed_blocks() == set(AWAY[2:7])


def test_a_load_that_raises_fails_whole(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(worker, PROMPT)
    monkeypatch.setattr(ChunkStore, "forget", raises)
    assert do(worker, StepWork(loads=[load_of(LONGER, PROMPT, 32)])) == (set(), {"loaded"})
    assert worker.take_failed_blocks() == set(AWAY[2:7])


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("the store has fallen over")


def test_a_save_that_raises_gives_its_blocks_back(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkStore, "settle", raises)
    work = StepWork(saves=[Save("r", PROMPT, "", HOME, is_last=True)])
    assert do(worker, work) == ({"r"}, set())


def test_a_rank_that_is_not_the_first_finds_rows_by_its_own_keys() -> None:
    first, second = worker_side(), worker_side(is_first=False)
    second.name_model(b"rank 1")
    rows = saved(second, PROMPT)
    load = load_of(LONGER, PROMPT, start=16)  # with the keys of the first rank
    assert do(second, StepWork(loads=[replace(load, stop=80)])) == (set(), {"loaded"})
    assert second.take_failed_blocks() == set()
    assert torch.equal(rows_of(second, AWAY, Span(16, 80)), rows[:, :, 16:80])
    do(second, StepWork(loads=[replace(load, start=0, stop=64, block_ids=OTHER)]))
    assert second.take_failed_blocks() == set()
    assert torch.equal(rows_of(second, OTHER, Span(0, 64)), rows[:, :, :64])
    assert not rows_of(second, OTHER, Span(64, 80)).any()  # no more than was promised
    assert second.take_report() is None  # the first one speaks for all
    for worker in (first, second):
        worker.close()


def test_no_more_rows_are_loaded_than_were_promised(worker: WorkerSide) -> None:
    """The worker may have more by now, for which the request has no blocks."""
    rows = saved(worker, PROMPT)
    load = replace(load_of(LONGER, PROMPT), stop=40, block_ids=OTHER[:3])
    assert do(worker, StepWork(loads=[load])) == (set(), {"loaded"})
    assert worker.take_failed_blocks() == set()
    assert torch.equal(rows_of(worker, OTHER, Span(0, 40)), rows[:, :, :40])
    assert not rows_of(worker, OTHER, Span(40, 48)).any()


def test_without_news_there_is_no_report(worker: WorkerSide) -> None:
    assert worker.take_report() is None
    saved(worker, PROMPT)
    assert worker.take_report() is not None
    assert worker.take_report() is None


def test_the_scheduler_promises_what_the_worker_has_saved(worker: WorkerSide) -> None:
    blocks = {"one": HOME, "two": AWAY}
    side = SchedulerSide(OPTIONS, build_repairs(OPTIONS), blocks.__getitem__, BLOCK_SIZE)
    side.learn([worker.facts("")])
    one, two = FakeRequest("one", PROMPT), FakeRequest("two", LONGER)
    assert admit(side, one) == (0, False)
    rows = fill(worker, HOME, 100)
    do(worker, side.step({"one": 100}, {"one": one}, ()))
    one.answer([1, 2])
    assert side.finish(one)[0]
    assert do(worker, side.step({}, {}, ())) == ({"one"}, set())
    side.report(worker.take_report())
    assert admit(side, two) == (100, True)
    _, loaded = do(worker, side.step({}, {}, ()))
    side.loaded(loaded)
    assert torch.equal(rows_of(worker, AWAY, Span(0, 100)), rows)
    two.answer([1])
    assert side.finish(two)[0]


def test_the_scheduler_hears_of_what_was_evicted() -> None:
    worker = worker_side(options=replace(OPTIONS, max_chunks=4))
    side = scheduler_side(block_ids=AWAY)
    side.learn([worker.facts("")])
    saved(worker, PROMPT)
    side.report(worker.take_report())
    assert admit(side, FakeRequest("r", LONGER)) == (100, True)
    for _ in range(3):  # what is used again and again outlives what is not
        saved(worker, words(100, seed=5))
        do(worker, StepWork(loads=[load_of(words(110, seed=5), words(100, seed=5))]))
    side.report(worker.take_report())
    kept = sum(worker._store.tiers.memory.holds(key) for key in KEYS)
    count, _ = admit(side, FakeRequest("again", LONGER))
    assert kept < 4
    assert count == min(100, kept * CHUNK_SIZE)
    worker.close()


def test_a_worker_that_starts_tells_what_its_disk_has_kept(tmp_path: Path) -> None:
    options = replace(OPTIONS, disk_cache_dir=str(tmp_path))
    before = worker_side(options=options)
    rows = saved(before, PROMPT)
    before.close()
    after = worker_side(options=options)
    facts = after.facts("no model")
    assert (facts.fingerprint, facts.refusal, facts.move_refusal) == (MODEL, "", "no model")
    assert not facts.must_prefetch
    side = scheduler_side(block_ids=AWAY)
    side.learn([facts])
    assert admit(side, FakeRequest("r", LONGER)) == (100, True)
    do(after, side.step({}, {}, ()))
    assert torch.equal(rows_of(after, AWAY, Span(0, 100)), rows)
    after.close()


def test_a_request_is_computed_where_a_disk_does_not_give_what_it_holds() -> None:
    worker, disk = worker_side(), FaultyDisk()
    worker._store.tiers.add_below(Opener("disk", lambda: disk), worker._store.adopt)
    saved(worker, PROMPT)
    assert worker._store.tiers.flush(20)
    for key in KEYS:
        drop(worker, key)
    disk.fault = "lost"
    side, request = scheduler_side(block_ids=AWAY), FakeRequest("r", LONGER)
    side.learn([worker.facts("")])
    assert admit(side, request) == (100, True)
    _, loaded = do(worker, side.step({}, {}, ()))
    assert worker.take_failed_blocks() == set(AWAY[:7])
    side.report(worker.take_report())
    side.loaded(loaded)
    assert side.match(request, 0) == (0, False)
    worker.close()


def test_blocks_are_not_taken_away_before_they_are_saved(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_save, settle = threading.Event(), ChunkStore.settle

    def late(store: ChunkStore) -> None:
        may_save.wait(20)
        settle(store)

    monkeypatch.setattr(ChunkStore, "settle", late)
    fill(worker, HOME, 100)
    worker.end_step(StepWork(saves=[Save("r", PROMPT, "", HOME, is_last=False)]))
    worker.wait_for_saves(["unknown"])
    assert worker._num_pending == 1
    waiting = threading.Thread(target=worker.wait_for_saves, args=(["r"],))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    may_save.set()
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(worker._store.index) == 4


def test_of_saves_those_that_are_not_done_are_remembered(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(worker, PROMPT)
    may_save = threading.Event()
    monkeypatch.setattr(ChunkStore, "settle", lambda store: may_save.wait(20))
    for name in ("one", "two"):
        worker.end_step(StepWork(saves=[Save(name, words(50), "", HOME, is_last=True)]))
    assert set(worker._saves) == {"one", "two"}
    may_save.set()
    worker.wait_for_saves(["one", "two"])
    assert worker.take_finished(None)[0] == {"one", "two"}


def test_saves_behind_a_stuck_one_are_dropped_and_give_their_blocks_back(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_save = threading.Event()
    monkeypatch.setattr(ChunkStore, "settle", lambda store: may_save.wait(20))
    monkeypatch.setattr(worker_module, "MOST_SAVE_WAIT_S", 0.0)
    fill(worker, HOME, 100)
    worker.end_step(StepWork(saves=[Save("stuck", PROMPT, "", HOME, is_last=False)]))
    time.sleep(0.01)
    for name, blocks in (("late", AWAY), ("stuck", HOME), ("later", AWAY)):
        worker.end_step(StepWork(saves=[Save(name, PROMPT, "", blocks, is_last=True)]))
    assert worker.take_finished(None)[0] == {"late", "later"}
    assert worker.metrics.snapshot()["dropped_writes"] == 2 * (len(PROMPT) // CHUNK_SIZE)
    may_save.set()
    worker.wait_for_saves(["stuck"])  # its blocks were being read: it is not dropped
    assert worker.take_finished(None)[0] == {"stuck"}


def prefetched(worker: WorkerSide, prefetch: Prefetch) -> Report:
    worker.begin_step(StepWork(prefetches=[prefetch]))
    wait_until(lambda: worker._num_pending == 0)
    report = worker.take_report()
    assert report is not None
    return report


@pytest.mark.parametrize("reuse", ["exact", "auto"])
def test_what_is_prefetched_is_told(worker: WorkerSide, reuse: str) -> None:
    assert prefetched(worker, Prefetch("r", PROMPT, "", reuse)) == Report(prefetched=["r"])  # type: ignore[arg-type]
    assert worker.take_report() is None


def test_words_of_text_elsewhere_are_asked_for_where_it_may_be_used(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(ChunkStore, "prefetch_moved", lambda _, rest, *__: asked.append(list(rest)))
    saved(worker, PROMPT)
    prefetched(worker, Prefetch("r", LONGER, "", "exact"))
    assert asked == []
    prefetched(worker, Prefetch("r", LONGER, "", "auto"))
    assert asked == [LONGER[len(PROMPT) :]]  # without what is known


@pytest.mark.parametrize("method", ["prefetch_prefix", "prefetch_moved"])
def test_a_store_that_raises_ends_the_wait_for_it(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(ChunkStore, method, raises)
    assert prefetched(worker, Prefetch("r", PROMPT, "", "auto")).prefetched == ["r"]


def test_what_another_process_has_stored_is_prefetched_and_then_promised() -> None:
    shared, workers = FaultyTier(), [worker_side(), worker_side()]
    for each in workers:
        each._store.tiers.add_below(Opener("shared", lambda: shared), each._store.adopt)
    one, two = workers
    rows = saved(one, [*words(40, seed=7), *PROMPT][:96])
    assert one._store.tiers.flush(20)
    side = scheduler_side(block_ids=AWAY)
    assert two.facts("").must_prefetch
    side.learn([two.facts("")])
    exact = FakeRequest("exact", [*words(40, seed=7), *PROMPT])
    moved = FakeRequest("moved", [*words(20, seed=8), *PROMPT[:56], *words(8)])
    for request, promised in ((moved, 76), (exact, 96)):
        assert admit(side, request) == (None, False)
        do(two, side.step({}, {}, ()))
        side.report(two.take_report())
        assert side.match(request, 0)[0] == promised
    side.allocated(exact, 96)
    do(two, side.step({}, {}, ()))
    assert torch.equal(rows_of(two, AWAY, Span(0, 96)), rows)
    for each in workers:
        each.close()


def test_closing_finishes_what_is_saved() -> None:
    worker = worker_side()
    fill(worker, HOME, 100)
    worker.end_step(StepWork(saves=[Save("r", PROMPT, "", HOME, is_last=True)]))
    worker.close()
    assert worker.take_finished(None) == ({"r"}, set())
    assert len(worker._store.index) == 4


def test_layers_are_passed_on_to_the_sparse_model(worker: WorkerSide) -> None:
    worker.before_attention("layers.0.attn")  # without one: nothing
    sparse = FakeSparse()
    worker.allow_moved(sparse, {})  # type: ignore[arg-type]
    worker.before_attention("layers.1.attn")
    assert sparse.layers == ["layers.1.attn"]
