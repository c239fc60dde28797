"""The side in vLLM's worker: the store, and transfers between it and vLLM's blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.build import build_store
from kvboost.config import Options
from kvboost.connectors.vllm.audits import AuditUnderWay
from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.connectors.vllm.messages import (
    Facts,
    Load,
    Prefetch,
    Report,
    Save,
    StepWork,
    Verdict,
)
from kvboost.connectors.vllm.reported import ReportedIndex
from kvboost.connectors.vllm.rows import BlockRows, HostBlocks, StagedRows
from kvboost.core import (
    FrameKey,
    KVGeometry,
    Namespace,
    PrefixKey,
    ReusePlan,
    Rotation,
    Span,
    prefix_key,
)
from kvboost.errors import KVBoostError
from kvboost.metrics import Metrics
from kvboost.models.rows import Rows, private_rows
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace, root
from kvboost.reuse.lookup import find
from kvboost.reuse.place import Placed, assemble
from kvboost.reuse.repair import Repair
from kvboost.reuse.store import commit
from kvboost.tiers.behind import give_way
from kvboost.tiers.epochs import owner

if TYPE_CHECKING:
    from kvboost.connectors.vllm.sparse import SparseModel
    from kvboost.models.base import Slots

log = logging.getLogger(__name__)

MOST_SAVE_WAIT_S = 2.0  # of the oldest save, until it is done; beyond that, new ones are dropped
NICENESS = 10  # of saves
IDLE_WAIT_S = 0.005  # for transfers, when the model has nothing to compute

Agree = Callable[[Sequence[bool]], list[bool]]
"""What is true on all ranks: each asks at the same time, and gets the same answer."""


@dataclass(frozen=True)
class KVFacts:
    """What identifies the K/V of vLLM's model, and what moving it needs."""

    fingerprint: bytes
    geometry: KVGeometry
    rotations: Mapping[int, Rotation | None]


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
        agree: Agree = list,
    ) -> None:
        """`is_first`: the rank that reports for all; `agree`: finds out what is true on all."""
        self._options, self._repairs, self.cache = options, repairs, cache
        self.metrics = Metrics()
        self._index = ReportedIndex()
        keep = partial(HostBlocks, cache)
        self._store = build_store(options, cache.geometry, self.metrics, self._index, keep=keep)
        self._sparse: SparseModel | None = None
        self._model = KVFacts(b"", cache.geometry, {})
        self._is_first, self._agree = is_first, agree
        self._prefetcher = ThreadPoolExecutor(4, "kvboost-prefetch")
        self._loader = ThreadPoolExecutor(1, "kvboost-load")
        self._saver = ThreadPoolExecutor(1, "kvboost-save", give_way, (NICENESS,))
        self._done = threading.Condition()
        self._num_pending = 0
        self._loaded: set[str] = set()
        self._saved: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._saves: dict[str, tuple[Future[None], float]] = {}  # of each request, and since when
        self._audits: deque[AuditUnderWay] = deque()
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
            must_prefetch=self._store.tiers.is_shared,
            changes=tuple(self._index.take_changes()),
            epochs=self._store.epochs.all(),
        )

    def begin_step(self, work: StepWork) -> None:
        """Start work that does not need the model."""
        for prefetch in work.prefetches:
            self._submit(self._prefetcher, self._prefetch, prefetch)
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
        for audit in work.audits:
            assert self._sparse is not None
            self._audits.append(AuditUnderWay(self._sparse, audit))
        if self._audits and (work.is_quiet or work.ends_audits):
            self._go_on_with_audit(gives_up=work.ends_audits)

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
        if report.prefetched:
            report.epochs = self._store.epochs.all()
        if not self._is_first:
            report = Report(failed=report.failed, prefetched=report.prefetched)
        return None if report == Report() else report

    def close(self) -> None:
        """Finish saves and close the store."""
        for threads in (self._prefetcher, self._loader):
            threads.shutdown(cancel_futures=True)
        self._saver.shutdown()
        self._store.tiers.close()

    @property
    def _has_news(self) -> bool:
        return bool(self._saved or self._loaded or self._report.prefetched)

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

    def _prefetch(self, prefetch: Prefetch) -> None:
        try:
            patience = self._store.tiers.patience()
            self._store.refresh(prefetch.tenant, patience)
            space = self._space(prefetch.tenant)
            chunks = split(prefetch.tokens, self._options.chunk_size)
            keys = derive(chunks, space)
            self._store.prefetch_prefix(keys, patience)
            if prefetch.reuse == "auto":
                known = find(chunks, keys, self._index).num_reused
                rest = np.asarray(prefetch.tokens[known:], dtype="<u4")
                with self._store.tiers.memory.holding(key.prefix for key in keys):
                    self._store.prefetch_moved(rest, space, patience)
        except Exception:
            log.exception("the chunks of a prompt could not be prefetched")
        finally:
            with self._done:
                self._report.prefetched.append(prefetch.request_id)

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
        """Fill rows with moved K/V, then compute gaps and repairs: the same ones on all ranks."""
        assert self._sparse is not None
        started, stop = time.perf_counter(), load.start
        try:
            rows, plan = self._place_moved(load)
            live = _positions(plan.live, load.start, load.stop)
            positions = sorted({*load.repaired, *live})
            self._sparse.forward(
                [load.tokens[position] for position in positions],
                positions,
                load.block_ids,
                correction=(rows, self._repairs[load.ratio].corrected(plan)),
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

    def _place_moved(self, load: Load) -> tuple[Rows, ReusePlan]:
        """Place what a plan reuses; its rows, and how much of it all ranks have placed.

        Raises:
            KVBoostError: another rank could not go on.
        """
        matches = load.plan.matches
        has = [False] * (1 + 2 * len(matches))  # whether it can go on, what is placed, what known
        try:
            wanted = self._by_own_keys(load)
            keys = [match.key for match in wanted.matches]
            rows = private_rows(self.cache.geometry, load.stop, self.cache.device)
            placed = self._assemble(wanted, load, rows).plan
            rows.length = load.stop
            blocks = BlockRows(self.cache, load.block_ids)
            for run in placed.runs:
                blocks.write(run.span, rows.read(run.span))
            spans = {match.span for match in placed.matches}
            with self._done:  # what it is storing now may come
                is_storing = self._num_pending > 0
            known = (is_storing or self._index.get(key) is not None for key in keys)
            has = [True, *(match.span in spans for match in matches), *known]
        finally:  # the others wait for it, and then for this rank's part of a forward
            can_go_on, *agreed = self._agree(has)
        if not can_go_on:
            raise KVBoostError("another rank failed")
        for key, is_known in zip(keys, agreed[len(matches) :], strict=True):
            if not is_known:  # a part alone is of no use
                self._index.remove(key)
        spans = {match.span for match, is_there in zip(matches, agreed, strict=False) if is_there}
        shared = tuple(match for match in placed.matches if match.span in spans)
        return rows, replace(placed, matches=shared)

    def _by_own_keys(self, load: Load) -> ReusePlan:
        """A plan by this rank's keys; it was made by those of the first rank."""
        if not load.chains:
            return load.plan
        own: dict[FrameKey, PrefixKey] = {}
        for key, (parent, tokens) in load.chains.items():
            before = root(self._space(load.tenant)) if parent is None else own[parent]
            own[key] = prefix_key(before, tokens)
        matches = (replace(match, key=own[match.key]) for match in load.plan.matches)
        return replace(load.plan, matches=tuple(matches))

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

    def _start_saving(self, save: Save) -> bool:
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
            return False
        _, since = self._saves.get(name, (None, now))
        self._saves[name] = self._submit(self._saver, self._save, save, self._now()), since
        return True

    def _now(self) -> torch.Event | None:
        """On a GPU: the end of all that the model was given so far."""
        return torch.accelerator.current_stream().record_event() if self._streams else None

    def _save(self, save: Save, written: torch.Event | None) -> None:
        try:
            space = self._space(save.tenant)
            if self._store.epochs.of(save.tenant) != save.epoch:  # deleted since
                return
            chunks = split(save.tokens, self._options.chunk_size)
            with self._stream(1, written):
                rows = StagedRows(self.cache, save.block_ids)
                commit(rows, chunks, derive(chunks, space), space, self._store)
            if space != self._space(save.tenant):  # deleted meanwhile
                self._store.delete(self._index.owned_by([owner(save.tenant, save.epoch)]))
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
        try:
            with stream:
                yield
        finally:  # vLLM may give the blocks to others then
            stream.synchronize()

    def _go_on_with_audit(self, *, gives_up: bool) -> None:
        """Run a step of an audit, or give it up; what is exact by then is saved."""
        current = self._audits[0]
        audit, verdict, goes_on = current.audit, None, not gives_up
        try:
            if goes_on:
                verdict = current.advance()
        except Exception:
            log.exception("an audit failed")
            goes_on = False
        if not self._agree([goes_on])[0]:  # others would wait for its next forward
            verdict = Verdict(audit.request_id)
        if verdict is None:
            return
        self._audits.popleft()
        self._report.verdicts.append(verdict)
        stop, where = current.exact_stop, (audit.tenant, audit.block_ids)
        save = Save(audit.request_id, audit.tokens[:stop], *where, is_last=True, epoch=audit.epoch)
        if self._start_saving(save) and self._is_first:
            self.metrics.add("promoted_tokens", stop - audit.exact_stop, tenant=audit.tenant)

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
