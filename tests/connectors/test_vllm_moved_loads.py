"""Moved text in vLLM's blocks: what is placed, what is computed, and how answers are audited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fake_vllm import (
    AWAY,
    CHUNK_SIZE,
    HOME,
    FakeSparse,
    changes_of,
    do,
    fill,
    load_of,
    rows_of,
    saved,
    worker_side,
)
from fakes import words
from kvboost.connectors.vllm import worker_side as module
from kvboost.connectors.vllm.audits import AUDIT_TOKENS
from kvboost.connectors.vllm.messages import Audit, Report, StepWork, Verdict
from kvboost.connectors.vllm.worker_side import WorkerSide
from kvboost.core import Rotation, Span
from kvboost.rope import move

TURN = Rotation((1.0, 0.1), 0, "half")
ROTATIONS = {0: TURN, 1: None, 2: TURN, 3: None}

DOCUMENT = words(96, seed=2)
STORED = [*words(40, seed=3), *DOCUMENT]
HEAD, DELTA = 20, -20
PROMPT = [*words(HEAD, seed=5), *DOCUMENT, *words(10, seed=6)]
MOVED = Span(HEAD, HEAD + len(DOCUMENT))


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    worker = worker_side()
    yield worker
    worker.close()


@pytest.fixture
def sparse(worker: WorkerSide) -> FakeSparse:
    sparse = FakeSparse()
    worker.allow_moved(sparse, ROTATIONS)  # type: ignore[arg-type]
    return sparse


def moved_rows(worker: WorkerSide, rows: torch.Tensor) -> torch.Tensor:
    """The document's rows of what was stored, with keys turned to where it stands now."""
    turned = rows[:, :, 40:].clone()
    move([turned], worker.cache.geometry, ROTATIONS, DELTA)
    return turned


def test_moved_rows_are_turned_and_placed_after_the_step(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    rows = saved(worker, STORED)
    worker.take_report()
    work = StepWork(loads=[load_of(PROMPT, STORED)])
    worker.begin_step(work)
    assert not rows_of(worker, AWAY, MOVED).any() and not sparse.forwards  # the model is in use
    assert worker.take_finished(None) == (set(), set())
    worker.end_step(work)
    assert torch.equal(rows_of(worker, AWAY, MOVED), moved_rows(worker, rows))
    assert not torch.equal(moved_rows(worker, rows), rows[:, :, 40:])
    assert worker.take_finished(None) == (set(), {"loaded"})
    assert worker.take_failed_blocks() == set()


def test_how_long_a_load_of_moved_text_took_is_told_once(
    worker: WorkerSide, sparse: FakeSparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(worker, STORED)
    worker.take_report()
    times = iter([100.0, 102.5])
    clock = SimpleNamespace(perf_counter=lambda: next(times), monotonic=lambda: 0.0)
    monkeypatch.setattr(module, "time", clock)
    worker.end_step(StepWork(loads=[load_of(PROMPT, STORED)]))
    assert worker.take_report() == Report(repairs_s={"loaded": 2.5})
    assert worker.take_report() is None


def test_what_is_new_and_what_is_repaired_is_computed(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    saved(worker, STORED)
    load = load_of(PROMPT, STORED)
    worker.end_step(StepWork(loads=[load]))
    ((tokens, positions),) = sparse.forwards
    assert load.repaired
    assert positions == sorted([*range(HEAD), *load.repaired])  # and not what vLLM computes
    assert tokens == [PROMPT[position] for position in positions]
    (corrected,) = sparse.spans
    assert MOVED.start <= corrected.start < corrected.stop == MOVED.stop


def test_rows_that_vllm_has_are_not_computed_or_written(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    saved(worker, STORED)
    load = load_of(PROMPT, STORED, start=16)
    worker.end_step(StepWork(loads=[load]))
    ((_, positions),) = sparse.forwards
    assert positions == sorted([*range(16, HEAD), *load.repaired])
    assert not rows_of(worker, AWAY, Span(0, 16)).any()


def test_moved_rows_that_are_gone_are_computed(worker: WorkerSide, sparse: FakeSparse) -> None:
    rows = saved(worker, STORED)
    lost = changes_of(STORED)[2].key  # tokens 64 to 96
    worker._store.tiers.memory.discard([lost])
    load = load_of(PROMPT, STORED)
    worker.end_step(StepWork(loads=[load]))
    ((_, positions),) = sparse.forwards
    gap = range(64 + DELTA, 64 + DELTA + CHUNK_SIZE)
    assert positions == sorted({*range(HEAD), *gap, *load.repaired})
    assert worker._index.get(lost) is None
    rest = rows_of(worker, AWAY, Span(gap.stop, MOVED.stop))
    assert torch.equal(rest, moved_rows(worker, rows)[:, :, gap.stop - HEAD :])
    assert worker.take_failed_blocks() == set()


def test_moved_text_that_cannot_be_computed_fails(worker: WorkerSide, sparse: FakeSparse) -> None:
    saved(worker, STORED)
    sparse.error = RuntimeError("no memory")
    worker.end_step(StepWork(loads=[load_of(PROMPT, STORED, start=16)]))
    assert worker.take_failed_blocks() == set(AWAY[1:8])  # rows 16 to 116
    assert worker.take_finished(None) == (set(), {"loaded"})
    report = worker.take_report()
    assert report is not None and "loaded" in report.repairs_s


ANSWERED = [*PROMPT, *words(5, seed=7)]
AUDIT = Audit("r", ANSWERED, len(PROMPT), HEAD, "", AWAY)
IDLE = StepWork(is_idle=True, is_quiet=True)


def judged(worker: WorkerSide, audit: Audit) -> tuple[Report, int]:
    """Carry out an audit; what is reported, and how many idle steps it took."""
    assert do(worker, StepWork(audits=[audit])) == (set(), set())  # nothing in a busy step
    for num_steps in range(1, 20):
        saves, _ = do(worker, IDLE)
        if saves:
            assert saves == {audit.request_id}
            report = worker.take_report()
            assert report is not None
            return report, num_steps
    raise AssertionError("no end")


def logits_of(*tops: int) -> torch.Tensor:
    """Five answer tokens' logits, of which these are the highest."""
    logits = torch.zeros(5, 4)
    logits[range(5), tops] = 2.0
    return logits


def test_an_audit_compares_reused_rows_with_computed_ones(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    rows = fill(worker, AWAY, len(ANSWERED))
    reused, full = logits_of(0, 1, 2, 3, 0), 2 * logits_of(0, 1, 2, 0, 1)
    sparse.logits = [reused, full]
    report, num_steps = judged(worker, AUDIT)
    (verdict,) = report.verdicts
    p, q = full.softmax(-1), reused.softmax(-1)
    assert verdict.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert verdict.top1 == pytest.approx(0.6)
    assert num_steps == 2
    first = len(PROMPT) - 1
    answer = list(range(first, len(ANSWERED) - 1))
    assert [positions for _, positions in sparse.forwards] == [
        answer,
        list(range(HEAD, first)),
        answer,
    ]
    for tokens, positions in sparse.forwards:
        assert tokens == [ANSWERED[position] for position in positions]
    # All of it is exact now, and stored.
    assert worker.metrics.snapshot()["promoted_tokens"] == 130 - HEAD
    do(worker, StepWork(loads=[load_of([*ANSWERED, 1], ANSWERED[:-1])]))
    assert worker.take_failed_blocks() == set()
    assert torch.equal(rows_of(worker, AWAY, Span(0, 130)), rows[:, :, :130])


def test_a_long_audit_is_done_in_pieces_between_which_others_run(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    sparse.logits = [torch.zeros(1, 4)] * 2
    long = words(160, seed=1)
    _, num_steps = judged(worker, replace(AUDIT, tokens=long, num_prompt=159, exact_stop=16))
    pieces = [positions for _, positions in sparse.forwards[1:-1]]
    assert [len(piece) for piece in pieces] == [AUDIT_TOKENS, 158 - 16 - AUDIT_TOKENS]
    assert [position for piece in pieces for position in piece] == list(range(16, 158))
    assert num_steps == 3


def test_equal_answers_have_no_divergence(worker: WorkerSide, sparse: FakeSparse) -> None:
    sparse.logits = [logits_of(0, 1, 2, 3, 0)] * 2
    assert judged(worker, AUDIT)[0].verdicts == [Verdict("r", 0.0, 1.0)]


@pytest.mark.parametrize("exact_stop", [0, HEAD])
def test_an_audit_that_fails_is_told_and_stores_only_what_was_exact(
    worker: WorkerSide, sparse: FakeSparse, exact_stop: int
) -> None:
    sparse.error = RuntimeError("no memory")
    report, _ = judged(worker, replace(AUDIT, exact_stop=exact_stop))
    assert report.verdicts == [Verdict("r")]
    entries = [change.entry for change in report.changes]
    stored = b"".join(entry.tokens for entry in entries if entry is not None)
    assert len(stored) == 4 * exact_stop
    assert not worker.metrics.snapshot().get("promoted_tokens")


def test_audits_are_done_one_after_the_other(worker: WorkerSide, sparse: FakeSparse) -> None:
    sparse.logits = [logits_of(0, 1, 2, 3, 0)] * 4
    do(worker, StepWork(audits=[AUDIT, replace(AUDIT, request_id="s")]))
    order = [sorted(do(worker, IDLE)[0]) for _ in range(4)]
    assert order == [[], ["r"], [], ["s"]]


def test_an_audit_waits_for_idle_time_until_the_scheduler_ends_it(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    rows = fill(worker, AWAY, len(ANSWERED))
    worker.end_step(StepWork(audits=[AUDIT]))
    worker.end_step(StepWork())
    assert worker._audits and worker.take_report() is None
    worker.end_step(StepWork(ends_audits=True))
    worker.wait_for_saves(["r"])
    assert worker.take_finished(None) == ({"r"}, set())  # its blocks are given back
    report = worker.take_report()
    assert report is not None and report.verdicts == [Verdict("r")]
    assert not worker._audits and not sparse.forwards
    do(worker, StepWork(loads=[load_of([*ANSWERED[:HEAD], 1], ANSWERED[:HEAD])]))
    assert worker.take_failed_blocks() == set()
    assert torch.equal(rows_of(worker, AWAY, Span(0, HEAD)), rows[:, :, :HEAD])


def test_an_audit_that_is_given_up_stores_what_is_exact_by_then(
    worker: WorkerSide, sparse: FakeSparse
) -> None:
    sparse.logits = [torch.zeros(1, 4)] * 2
    long = words(300, seed=1)
    audit = replace(AUDIT, tokens=long, num_prompt=299, exact_stop=16, block_ids=[*AWAY, *HOME])
    do(worker, replace(IDLE, audits=[audit]))
    assert len(sparse.forwards) == 2
    do(worker, StepWork(is_idle=True))  # somebody waits
    assert len(sparse.forwards) == 2
    assert do(worker, StepWork(ends_audits=True)) == ({"r"}, set())
    report = worker.take_report()
    assert report is not None and report.verdicts == [Verdict("r")]
    assert len(sparse.forwards) == 2
    stored = b"".join(change.entry.tokens for change in report.changes if change.entry is not None)
    assert len(stored) == 4 * (16 + AUDIT_TOKENS)
    assert worker.metrics.snapshot()["promoted_tokens"] == AUDIT_TOKENS
