"""The side in vLLM's worker: the store, and transfers between it and vLLM's blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.build import build_store
from kvboost.config import Options
from kvboost.connectors.vllm.blocks import BlockRows, PagedCache, StagedRows
from kvboost.connectors.vllm.messages import (
    Audit,
    Bring,
    Change,
    Facts,
    Load,
    Report,
    Save,
    StepWork,
    Verdict,
)
from kvboost.core import (
    Anchor,
    Entry,
    FrameKey,
    KVGeometry,
    Namespace,
    ReusePlan,
    Rotation,
    Span,
)
from kvboost.metrics import Metrics
from kvboost.models.rows import private_rows
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import find
from kvboost.reuse.place import Placed, assemble
from kvboost.reuse.repair import Repair
from kvboost.reuse.store import commit
from kvboost.tiers.index import ChunkIndex

if TYPE_CHECKING:
    from kvboost.connectors.vllm.sparse import SparseModel
    from kvboost.models.base import Slots

log = logging.getLogger(__name__)

AUDIT_TOKENS = 128  # computed at once: a request that comes meanwhile waits for no more
AUDIT_PATIENCE_S = 10.0  # without idle time: an audit holds blocks
MOST_SAVE_WAIT_S = 2.0  # of the oldest save, until it is done; beyond that, new ones are dropped
IDLE_WAIT_S = 0.005  # for transfers, when the model has nothing to compute


@dataclass(frozen=True)
class KVFacts:
    """What names and places the K/V of vLLM's model."""

    fingerprint: bytes
    geometry: KVGeometry
    rotations: Mapping[int, Rotation | None]


class ReportedIndex(ChunkIndex):
    """An index whose changes can be followed by a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: deque[Change] = deque()

    def add(self, entry: Entry, anchors_in_it: Iterable[Anchor] = ()) -> None:
        """Make an entry findable."""
        words = tuple(anchors_in_it)
        super().add(entry, words)
        self._changes.append(Change(entry.key, entry, words))

    def remove(self, key: FrameKey) -> None:
        """Forget an entry."""
        super().remove(key)
        self._changes.append(Change(key))

    def take_changes(self) -> list[Change]:
        """The changes since the last call."""
        return [self._changes.popleft() for _ in range(len(self._changes))]


class WorkerSide:
    """Loads, saves and repairs what the scheduler's side decided.

    What needs the model runs after a step; the rest on threads beside it.
    """

    def __init__(
        self,
        options: Options,
        repairs: Mapping[float, Repair],
        cache: PagedCache,
        *,
        is_first: bool = True,
    ) -> None:
        """`is_first`: the rank that reports for all."""
        self._options, self._repairs, self.cache = options, repairs, cache
        self.metrics = Metrics()
        self._index = ReportedIndex()
        self._store = build_store(options, cache.geometry, self.metrics, self._index)
        self._sparse: SparseModel | None = None
        self._model = KVFacts(b"", cache.geometry, {})
        self._is_first = is_first
        self._bringer = ThreadPoolExecutor(4, "kvboost-bring")
        self._loader = ThreadPoolExecutor(1, "kvboost-load")
        self._saver = ThreadPoolExecutor(1, "kvboost-save")
        self._done = threading.Condition()
        self._num_pending = 0
        self._loaded: set[str] = set()
        self._saved: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._saves: dict[str, tuple[Future[None], float]] = {}  # of each request, and since when
        self._audits: deque[tuple[Audit, float, Iterator[Verdict | None]]] = deque()  # since when
        self._report = Report()
        on_cpu = cache.device.type == "cpu"
        self._streams = [] if on_cpu else [torch.Stream(cache.device) for _ in range(2)]

    def name_model(self, fingerprint: bytes) -> None:
        """Set the fingerprint of the model."""
        self._model = KVFacts(fingerprint, self.cache.geometry, {})

    def allow_moved(self, sparse: SparseModel, rotations: Mapping[int, Rotation | None]) -> None:
        """Allow moved text, repaired by this model."""
        self._sparse = sparse
        self._model = KVFacts(self._model.fingerprint, self.cache.geometry, rotations)

    def facts(self, move_refusal: str) -> Facts:
        """For the scheduler's side."""
        return Facts(
            fingerprint=self._model.fingerprint,
            refusal="",
            move_refusal=move_refusal,
            must_bring=self._store.tiers.is_shared,
            changes=tuple(self._index.take_changes()),
            epochs=self._store.epochs.all(),
        )

    def begin_step(self, work: StepWork) -> None:
        """Start work that does not need the model."""
        for bring in work.brings:
            self._submit(self._bringer, self._bring, bring)
        for load in work.loads:
            if load.is_exact:
                self._submit(self._loader, self._load, load, self._now())

    def before_attention(self, layer_name: str) -> None:
        """A layer has written its K/V and attention is about to read it."""
        if self._sparse is not None:
            self._sparse.before_attention(layer_name)

    def end_step(self, work: StepWork) -> None:
        """After a step: save its K/V, and do the work that needs the model."""
        for save in work.saves:
            self._start_saving(save)
        for load in work.loads:
            if not load.is_exact:
                self._load_moved(load)
        now = time.monotonic()
        self._audits += [(audit, now, self._audit(audit)) for audit in work.audits]
        if self._audits and (work.is_idle or now - self._audits[0][1] > AUDIT_PATIENCE_S):
            self._go_on_with_audit(is_idle=work.is_idle)

    def wait_for_saves(self, request_ids: Iterable[str]) -> None:
        """Wait for saves of requests that are about to lose their blocks."""
        for request_id in request_ids:
            if request_id in self._saves:
                self._saves[request_id][0].result()

    def take_finished(self, work: StepWork | None) -> tuple[set[str], set[str]]:
        """Requests whose blocks are saved, and requests whose blocks are loaded or failed."""
        with self._done:
            if work is not None and work.is_idle and self._num_pending and not self._has_news:
                self._done.wait(IDLE_WAIT_S)
            saved, self._saved = self._saved, set()
            loaded, self._loaded = self._loaded, set()
        return saved, loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed."""
        with self._done:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> Report | None:
        """The report for the scheduler's side, if there is anything new."""
        with self._done:
            report, self._report = self._report, Report()
        report.changes = self._index.take_changes()
        if report.brought:
            report.epochs = self._store.epochs.all()
        return None if report == Report() or not self._is_first else report

    def close(self) -> None:
        """Finish saves and close the store."""
        for threads in (self._bringer, self._loader):
            threads.shutdown(cancel_futures=True)
        self._saver.shutdown()
        self._store.tiers.close()

    @property
    def _has_news(self) -> bool:
        return bool(self._saved or self._loaded or self._report.brought)

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[..., None], *arguments: Any
    ) -> Future[None]:
        with self._done:
            self._num_pending += 1
        return threads.submit(self._carry_out, work, *arguments)

    def _carry_out(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            with torch.inference_mode():
                work(*arguments)
        finally:
            with self._done:
                self._num_pending -= 1
                self._done.notify_all()

    def _bring(self, bring: Bring) -> None:
        try:
            patience = self._store.tiers.patience()
            self._store.refresh(bring.tenant, patience)
            space = self._space(bring.tenant)
            chunks = split(bring.tokens, self._options.chunk_size)
            keys = derive(chunks, space)
            self._store.bring_prefix(keys, patience)
            if bring.reuse == "auto":
                known = find(chunks, keys, self._index).num_reused
                rest = np.asarray(bring.tokens[known:], dtype="<u4")
                self._store.bring_moved(rest, space, patience)
        except Exception:
            log.exception("what tiers have of a prompt could not be brought")
        finally:
            with self._done:
                self._report.brought.append(bring.request_id)

    def _load(self, load: Load, given: torch.Event | None) -> None:
        """Fill blocks with exact K/V, as far as it is available."""
        stop = load.start
        try:
            plan = self._own_plan(load)
            with self._stream(0, given):
                rows = StagedRows(self.cache, load.block_ids)
                placed = self._assemble(plan, load, rows)
                rows.flush()
            stop = placed.plan.matches[-1].span.stop if placed.plan.matches else load.start
        except Exception:
            log.exception("K/V could not be loaded, and is computed instead")
        finally:
            with self._done:
                self._fail_from(stop, load)
                self._loaded.add(load.request_id)

    def _load_moved(self, load: Load) -> None:
        """Fill rows with moved K/V, then compute gaps and repairs."""
        assert self._sparse is not None
        started, stop = time.perf_counter(), load.start
        try:
            rows = private_rows(self.cache.geometry, load.stop, self.cache.device)
            placed = self._assemble(load.plan, load, rows)
            rows.length = load.stop
            blocks = BlockRows(self.cache, load.block_ids)
            for run in placed.plan.runs:
                blocks.write(run.span, rows.read(run.span))
            live = _positions(placed.plan.live, load.start, load.stop)
            positions = sorted({*load.repaired, *live})
            self._sparse.forward(
                [load.tokens[position] for position in positions],
                positions,
                load.block_ids,
                correction=(rows, self._repairs[load.ratio].corrected(placed.plan)),
            )
            if self._streams:
                torch.accelerator.synchronize()
            stop = load.stop
        except Exception:
            log.exception("moved text could not be used, and is computed instead")
        with self._done:
            self._fail_from(stop, load)
            self._loaded.add(load.request_id)
            self._report.repairs_s[load.request_id] = time.perf_counter() - started

    def _assemble(self, plan: ReusePlan, load: Load, rows: Slots) -> Placed:
        """Place the chunks of a plan that tiers deliver."""
        space = self._space(load.tenant)
        chunks = self._store.tiers.get(list(dict.fromkeys(each.key for each in plan.matches)))
        placed = assemble(plan, load.tokens, rows, self._model, self._store, space, chunks)
        self._store.forget(placed.lost)
        return placed

    def _fail_from(self, stop: int, load: Load) -> None:
        """Report the blocks of a load whose rows are not all filled."""
        size = self.cache.block_size
        if stop < load.stop:
            self._report.failed.append(load.request_id)
            self._failed_blocks.update(load.block_ids[stop // size : -(-load.stop // size)])

    def _start_saving(self, save: Save) -> None:
        """Queue a save, or drop it: blocks that wait to be saved are missing in vLLM.

        Never dropped while an earlier save of the same request is pending: that one still reads
        these blocks.
        """
        self._saves = {name: each for name, each in self._saves.items() if not each[0].done()}
        now, name = time.monotonic(), save.request_id
        oldest = min((since for _, since in self._saves.values()), default=now)
        if now - oldest > MOST_SAVE_WAIT_S and name not in self._saves:
            if save.is_last:
                num_chunks = len(save.tokens) // self._options.chunk_size
                self.metrics.add("dropped_writes", num_chunks, tenant=save.tenant)
                with self._done:
                    self._saved.add(name)
            return
        _, since = self._saves.get(name, (None, now))
        self._saves[name] = self._submit(self._saver, self._save, save, self._now()), since

    def _now(self) -> torch.Event | None:
        """On a GPU: the end of all that the model was given so far."""
        return torch.accelerator.current_stream().record_event() if self._streams else None

    def _save(self, save: Save, written: torch.Event | None) -> None:
        try:
            space = self._space(save.tenant)
            chunks = split(save.tokens, self._options.chunk_size)
            with self._stream(1, written):
                rows = StagedRows(self.cache, save.block_ids)
                commit(rows, chunks, derive(chunks, space), space, self._store)
        except Exception:
            log.exception("K/V could not be saved")
        finally:
            if save.is_last:
                with self._done:
                    self._saved.add(save.request_id)

    @contextmanager
    def _stream(self, number: int, after: torch.Event | None = None) -> Iterator[None]:
        """Copies of a thread, on a GPU concurrent with the model; finished when it ends."""
        if not self._streams:
            yield
            return
        stream = self._streams[number]
        if after is not None:
            stream.wait_event(after)
        with stream:
            yield
        stream.synchronize()

    def _go_on_with_audit(self, *, is_idle: bool) -> None:
        """Run a step of an audit, or abandon it if there is no idle time: it holds blocks."""
        audit, _, steps = self._audits[0]
        verdict: Verdict | None = Verdict(audit.request_id)
        try:
            verdict = next(steps) if is_idle else verdict
        except Exception:
            log.exception("an audit did not come to its end")
        if verdict is None:
            return
        self._audits.popleft()
        self._report.verdicts.append(verdict)
        is_exact = verdict.kl is not None
        tokens = audit.tokens[: -1 if is_exact else audit.exact_stop]
        self._start_saving(
            Save(audit.request_id, tokens, audit.tenant, audit.block_ids, is_last=True)
        )

    def _audit(self, audit: Audit) -> Iterator[Verdict | None]:
        """Compute an answer's logits on the rows it was made from, then on rows computed in full.

        Step by step; the rows are exact afterwards.
        """
        assert self._sparse is not None
        tokens, first, stop = audit.tokens, audit.num_prompt - 1, len(audit.tokens) - 1
        answer, count = range(first, stop), stop - first

        def logits() -> torch.Tensor:
            assert self._sparse is not None
            rest = tokens[first:stop]
            return self._sparse.forward(rest, answer, audit.block_ids, num_logits=count).float()

        reused = logits().log_softmax(-1)
        for start in range(audit.exact_stop, first, AUDIT_TOKENS):
            piece = range(start, min(start + AUDIT_TOKENS, first))
            self._sparse.forward(tokens[start : piece.stop], piece, audit.block_ids)
            yield None
        full = logits().log_softmax(-1)
        kl = (full.exp() * (full - reused)).sum(-1).clamp_min(0).mean()
        same = (full.argmax(-1) == reused.argmax(-1)).float().mean()
        yield Verdict(audit.request_id, float(kl), float(same))

    def _own_plan(self, load: Load) -> ReusePlan:
        """What this rank has of a prompt now, by its own keys."""
        chunks = split(load.tokens, self._options.chunk_size)
        found = find(chunks, derive(chunks, self._space(load.tenant)), self._index)
        return found.after(load.start).before(load.stop)

    def _space(self, tenant: str) -> Namespace:
        epoch = self._store.epochs.of(tenant)
        return namespace(self._model.fingerprint, tenant, None, epoch=epoch)


def _positions(spans: Iterable[Span], start: int, stop: int) -> Iterator[int]:
    """Positions of spans within [start, stop)."""
    for span in spans:
        part = span.within(Span(start, stop))
        yield from range(part.start, part.stop)
