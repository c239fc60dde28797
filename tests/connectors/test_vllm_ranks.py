"""Moved text on several ranks: each has heads of its own, and all compute the same rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from fake_vllm import (
    AWAY,
    BLOCK_SIZE,
    CHUNK_SIZE,
    DOCUMENT,
    ELSEWHERE,
    MODEL,
    FakeRequest,
    FakeSparse,
    admit,
    changes_of,
    rows_of,
    saved,
    scheduler_side,
    worker_side,
)
from fakes import words
from kvboost.connectors.vllm import audits as audits_module
from kvboost.connectors.vllm.messages import Audit, Change, Facts, Load, Report, StepWork
from kvboost.connectors.vllm.scheduler_side import SchedulerSide
from kvboost.connectors.vllm.worker_side import WorkerSide
from kvboost.core import Rotation, Span
from kvboost.rope import move
from kvboost.tiers.store import ChunkStore

TURN = Rotation((1.0, 0.1), 0, "half")
ROTATIONS = {0: TURN, 1: None, 2: TURN, 3: None}
PREFIX = words(CHUNK_SIZE, seed=1)
MOVED = Span(CHUNK_SIZE + 12, CHUNK_SIZE + 12 + len(DOCUMENT))
DELTA = MOVED.start - 40  # the document began at position 40
PROMPT = [*PREFIX, *words(12, seed=5), *DOCUMENT, *words(8, seed=6)]


class Agreement:
    """What is true on all of two ranks, each of which has a thread."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._said: list[Sequence[bool]] = []
        self._found: list[bool] = []

    def __call__(self, flags: Sequence[bool]) -> list[bool]:
        self._said.append(flags)
        if self._barrier.wait() == 0:
            self._found = [all(each) for each in zip(*self._said, strict=True)]
            self._said = []
        self._barrier.wait()
        return self._found


@pytest.fixture
def ranks() -> Iterator[list[WorkerSide]]:
    agreement = Agreement()
    made = [worker_side(is_first=first, agree=agreement) for first in (True, False)]
    made[1].name_model(b"rank 1")
    for each in made:
        each.allow_moved(FakeSparse(), ROTATIONS)  # type: ignore[arg-type]
    yield made
    for each in made:
        each.close()


def scheduler(ranks: Sequence[WorkerSide]) -> SchedulerSide:
    """A side that has learned what ranks hold."""
    side = scheduler_side(block_ids=AWAY)
    side.learn([each.facts("") for each in ranks])
    return side


def planned(side: SchedulerSide) -> Load:
    """The load of a prompt with a stored prefix and a document that has moved."""
    admit(side, FakeRequest("r", PROMPT))
    (load,) = side.step({}, {}, ()).loads
    return load


def load_on(ranks: Sequence[WorkerSide], load: Load) -> None:
    """Carry out a load on all ranks at once."""
    on_all(ranks, StepWork(loads=[load]))


def on_all(ranks: Sequence[WorkerSide], work: StepWork) -> None:
    threads = [threading.Thread(target=each.end_step, args=(work,)) for each in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
        assert not each.is_alive(), "a rank waits for another one"


def forwards(worker: WorkerSide) -> list[tuple[list[int], list[int]]]:
    assert isinstance(worker._sparse, FakeSparse)
    return worker._sparse.forwards


def test_each_rank_moves_its_heads_and_all_compute_the_same(ranks: list[WorkerSide]) -> None:
    stored = []
    for number, each in enumerate(ranks):
        saved(each, PREFIX)
        stored.append(saved(each, ELSEWHERE, scale=number + 1.0)[:, :, 40 : 40 + len(DOCUMENT)])
    load = planned(scheduler(ranks))
    assert not load.is_exact
    load_on(ranks, load)
    first, second = ranks
    assert forwards(first) == forwards(second) != []
    for each, rows in zip(ranks, stored, strict=True):
        turned = rows.clone()
        move([turned], each.cache.geometry, ROTATIONS, DELTA)
        assert torch.equal(rows_of(each, AWAY, MOVED), turned)
        assert each.take_finished(None) == (set(), {"r"})
        assert each.take_failed_blocks() == set()


def test_what_one_rank_has_lost_all_compute_and_forget(ranks: list[WorkerSide]) -> None:
    for each in ranks:
        saved(each, PREFIX)
        saved(each, ELSEWHERE)
    side = scheduler(ranks)
    load = planned(side)
    number, lost = next((n, m) for n, m in enumerate(load.plan.matches) if m.delta)
    own = ranks[1]._by_own_keys(load).matches[number].key
    ranks[1]._store.tiers.memory.discard([own])
    load_on(ranks, load)
    first, second = ranks
    assert forwards(first) == forwards(second)
    ((_, positions),) = forwards(first)
    assert set(range(lost.span.start, lost.span.stop)) < set(positions)
    assert not rows_of(second, AWAY, lost.span).any()
    for each in ranks:
        assert each.take_failed_blocks() == set()
    assert first._index.get(lost.key) is None
    assert second._index.get(own) is None
    report = first.take_report()
    assert report is not None and Change(lost.key) in report.changes  # it is promised no more


def test_what_a_rank_is_still_storing_is_not_forgotten(ranks: list[WorkerSide]) -> None:
    for each in ranks:
        saved(each, PREFIX)
        saved(each, ELSEWHERE)
    first, second = ranks
    load, is_done = planned(scheduler(ranks)), threading.Event()
    number, lost = next((n, m.key) for n, m in enumerate(load.plan.matches) if m.delta)
    own = second._by_own_keys(load).matches[number].key
    second._store.tiers.memory.discard([own])
    second._index.remove(own)
    second._submit(second._saver, is_done.wait)
    load_on(ranks, load)
    is_done.set()
    assert first._index.get(lost) is not None
    assert forwards(first) == forwards(second) != []


def test_a_request_waits_until_all_ranks_have_prefetched() -> None:
    side = scheduler_side()
    side.learn([replace(facts(), must_prefetch=True)] * 2)
    request = FakeRequest("r", PROMPT)
    side.add(request)
    for _ in range(2):
        assert side.match(request, 0) == (None, False)
        side.report(Report(prefetched=["r"]))
    assert side.match(request, 0)[1]


def test_an_audit_that_fails_on_one_rank_ends_on_all(
    ranks: list[WorkerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_fails(sparse: FakeSparse, _: Audit) -> Iterator[int]:
        for _ in range(2):
            if sparse is failing:
                raise MemoryError
            yield 16

    monkeypatch.setattr(audits_module, "compared", one_fails)
    failing = ranks[1]._sparse
    audit = Audit("r", PROMPT, len(PROMPT) - 4, 0, "", AWAY)
    on_all(ranks, StepWork(audits=[audit], is_idle=True, is_quiet=True))
    for each in ranks:
        assert not each._audits


def test_a_rank_that_fails_makes_all_compute(
    ranks: list[WorkerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ranks:
        saved(each, PREFIX)
        saved(each, ELSEWHERE)
    load, failing, forget = planned(scheduler(ranks)), ranks[1]._store, ChunkStore.forget

    def one_fails(store: ChunkStore, keys: object) -> None:
        if store is failing:
            raise RuntimeError("the store has fallen over")
        forget(store, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkStore, "forget", one_fails)
    load_on(ranks, load)
    for each in ranks:
        assert forwards(each) == []
        assert each.take_failed_blocks() == set(AWAY[: -(-load.stop // BLOCK_SIZE)])
        assert each.take_finished(None) == (set(), {"r"})


def test_a_rank_that_is_not_the_first_reports_only_failed_loads_and_prefetches() -> None:
    worker = worker_side(is_first=False)
    saved(worker, PREFIX)
    assert worker.take_report() is None
    load = planned(scheduler_side(PREFIX, ELSEWHERE, block_ids=AWAY))
    exact = replace(load, plan=load.plan.before(CHUNK_SIZE), stop=64)
    worker.begin_step(StepWork(loads=[exact]))
    worker._loader.shutdown()
    report = worker.take_report()
    assert report is not None and (report.failed, report.changes) == (["r"], [])
    worker.close()


def facts(move_refusal: str = "") -> Facts:
    changes = tuple(change for stored in (PREFIX, ELSEWHERE) for change in changes_of(stored))
    return Facts(MODEL, "", move_refusal, must_prefetch=False, changes=changes)


def test_a_single_rank_is_not_told_of_chunks_before_those_of_a_plan() -> None:
    assert planned(scheduler_side(PREFIX, ELSEWHERE)).chains == {}


def test_a_plan_tells_ranks_the_tokens_that_their_keys_are_made_of() -> None:
    side = scheduler_side()
    side.learn([facts(), facts()])
    load = planned(side)
    assert {match.key for match in load.plan.matches} <= load.chains.keys()
    stored = [tokens for _, tokens in load.chains.values()]
    assert stored[0] == changes_of(PREFIX)[0].entry.tokens  # type: ignore[union-attr]
    parents = [parent for parent, _ in load.chains.values()]
    assert parents.count(None) == 2  # two texts begin
    seen: set[bytes | None] = {None}
    for key, (parent, _) in load.chains.items():
        assert parent in seen
        seen.add(key)


def test_moved_text_is_left_out_where_what_was_before_it_is_not_known() -> None:
    side = scheduler_side()
    side.learn([facts(), facts()])
    (first, *_) = changes_of(ELSEWHERE)
    assert first.entry is not None and first.entry.num_tokens >= CHUNK_SIZE // 2
    side.report(Report(changes=[Change(first.key)]))
    assert admit(side, FakeRequest("r", PROMPT)) == (len(PREFIX), True)


def test_a_rank_that_cannot_move_text_speaks_for_all() -> None:
    side = scheduler_side()
    side.learn([facts(), facts("its blocks are of another kind")])
    assert admit(side, FakeRequest("r", PROMPT)) == (len(PREFIX), True)


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    first, second, *others = changes_of(words(200, seed=9))
    assert first.entry is not None
    forged = replace(first, entry=replace(first.entry, parent=second.key))
    found = []
    for start in (first, forged):
        side, changes = scheduler_side(), (start, second, *others)
        side.learn([Facts(MODEL, "", "", must_prefetch=False, changes=changes)] * 2)
        found.append(admit(side, FakeRequest("r", [*words(40, seed=77), *words(200, seed=9)])))
    assert found[0] == found[1] and found[0][1]
