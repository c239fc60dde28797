"""The side in vLLM's scheduler: how much of a prompt the workers can supply. No tensors.

It keeps a copy of the workers' index and decides by it; what turns out to be gone is computed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvboost.config import Options, check_reuse, hint
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
from kvboost.core import ReuseMode, ReusePlan
from kvboost.errors import ConfigError
from kvboost.policy.cost import MOVED_GAIN, CostModel, Work
from kvboost.policy.guard import QualityGuard
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import LEAST_TOKENS, find, find_moved
from kvboost.reuse.repair.base import Repair
from kvboost.tiers.index import ChunkIndex

log = logging.getLogger(__name__)

REQUEST_OPTIONS = ("reuse",)
"""What `kv_transfer_params={"kvboost": {...}}` of a request may set."""

MOST_AUDITED = 32  # tokens of an answer
LONGEST_AUDIT = 8192  # tokens of prompt and answer: blocks are held until it is done


class VLLMRequest(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    block_hashes: MutableSequence[bytes]
    cache_salt: str | None
    kv_transfer_params: Mapping[str, Any] | None
    lora_request: object | None
    mm_features: Sequence[object]
    prompt_embeds: object | None


@dataclass
class _Known:
    """What is known of a request that has not ended."""

    reuse: ReuseMode
    tenant: str
    waits: bool = False  # for the workers to bring what they can
    loads: bool = False  # blocks are being filled
    exact_stop: int | None = None  # rows from here on have something moved below them
    ratio: float = 0.0  # of moved tokens that are repaired
    to_load: tuple[int, int, ReusePlan] | None = None  # rows that were promised, and from where
    was_loaded: bool = False  # since it was preempted: if vLLM asks again, that has failed
    is_saved: bool = False  # its prompt, or it is on its way
    num_exact: int = 0
    num_moved: int = 0
    num_repaired: int = 0

    def provenance(self) -> dict[str, Any]:
        """For the answer: what of its prompt was reused."""
        return {
            "provenance": "exact" if self.exact_stop is None else "approximate",
            "exact_tokens": self.num_exact,
            "moved_tokens": self.num_moved,
            "repaired_tokens": self.num_repaired,
        }


class Words:
    """Evidence for a repair strategy that goes by the prompt's tokens alone."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def deviation(self) -> npt.NDArray[np.float32]:
        """Not measured inside vLLM."""
        raise NotImplementedError

    attention = sensitivity = deviation


class SchedulerSide:
    """Decides, request by request and step by step, what the workers load and save."""

    def __init__(
        self,
        options: Options,
        repairs: Mapping[float, Repair],
        blocks_of: Callable[[str], Sequence[int]],
        hash_block_size: int,
    ) -> None:
        """`blocks_of` tells the blocks of a request, `hash_block_size` the tokens in a hash."""
        self._options, self._repairs = options, repairs
        self._blocks_of, self._hash_block_size = blocks_of, hash_block_size
        self._facts = Facts(b"", "no worker has said what it can", "", must_bring=False, changes=())
        self._index = ChunkIndex()
        self._known: dict[str, _Known] = {}
        self._work = StepWork()
        self._audited: dict[str, tuple[str, float]] = {}  # by request: tenant and ratio
        self._cost = CostModel()
        self._measured: tuple[Work, float] | None = None
        self._num_steps = 0  # that were not reported yet
        self.guard = QualityGuard(options.quality_budget, tuple(repairs), options.audit_ratio)
        self.counts: Counter[str] = Counter()  # since they were taken

    def learn(self, facts: Sequence[Facts]) -> None:
        """Hear from all workers, when they have started.

        Each rank has keys of its own. All hold their part of the same chunks, so that the index of
        the first stands for all; what another rank turns out to miss is computed.
        """
        self._facts = next((each for each in facts if each.refusal), facts[0])
        self._note(self._facts.changes)
        if self._facts.refusal:
            log.warning("KVBoost reuses nothing: %s", self._facts.refusal)
        elif self._facts.move_refusal:
            log.warning("KVBoost reuses exact text only: %s", self._facts.move_refusal)

    def add(self, request: VLLMRequest) -> None:
        """A request came in."""
        if self._facts.refusal or not _is_plain(request):
            return
        reuse = _asked_for(request.kv_transfer_params, self._options.reuse)
        if reuse == "off":
            return
        known = _Known(reuse, request.cache_salt or "", waits=self._facts.must_bring)
        self._known[request.request_id] = known
        if known.waits:
            tokens = list(request.all_token_ids)
            self._work.brings.append(Bring(request.request_id, tokens, known.tenant, known.reuse))

    def match(self, request: VLLMRequest, num_local: int) -> tuple[int | None, bool]:
        """How many tokens after the first `num_local` can be supplied; whether beside the step.

        None: not known yet.
        """
        known = self._known.get(request.request_id)
        if known is None or known.was_loaded:
            return 0, False
        if known.waits:
            return None, False
        plan, known.ratio = self._find(request, num_local, known)
        stop = plan.matches[-1].span.stop if plan.matches else 0
        if stop - num_local < LEAST_TOKENS:
            known.to_load = None
            return 0, False
        known.to_load = (num_local, stop, plan)
        if plan.moved:
            first = plan.moved[0].start
            known.exact_stop = first if known.exact_stop is None else min(first, known.exact_stop)
            self._set_apart(request, known.exact_stop)
        return stop - num_local, not plan.moved

    def allocated(self, request: VLLMRequest, num_external: int) -> None:
        """Blocks were given to a request, also for what shall be supplied."""
        known = self._known.get(request.request_id)
        if known is None or known.to_load is None or num_external == 0:
            return
        (start, stop, plan), tokens = known.to_load, list(request.all_token_ids)
        known.to_load, known.loads, known.was_loaded = None, not plan.moved, True
        repair = self._repairs.get(known.ratio)
        load = Load(
            request_id=request.request_id,
            tokens=tokens,
            tenant=known.tenant,
            block_ids=list(self._blocks_of(request.request_id)),
            start=start,
            stop=stop,
            plan=plan,
            ratio=known.ratio,
            repaired=repair.select(plan, Words(tokens)) if repair and plan.moved else (),
        )
        self._work.loads.append(load)
        known.num_moved = sum(len(run) for run in plan.moved)
        known.num_exact = plan.num_reused - known.num_moved
        known.num_repaired = len(load.repaired)

    def step(
        self,
        num_scheduled: Mapping[str, int],
        requests: Mapping[str, VLLMRequest],
        preempted: Iterable[str],
    ) -> StepWork:
        """The work that goes with a step, in which so many tokens of requests are computed."""
        work, self._work = self._work, StepWork()
        work.preempted = set(preempted)
        work.is_idle = not num_scheduled
        for request_id in work.preempted & self._known.keys():
            self._known[request_id].was_loaded = False
        for request_id, count in num_scheduled.items():
            known, request = self._known.get(request_id), requests.get(request_id)
            if known is None or request is None or known.is_saved:
                continue
            if request.num_computed_tokens + count >= request.num_prompt_tokens:
                known.is_saved = True
                save = self._save(request, known, request.num_prompt_tokens, is_last=False)
                work.saves += [save] if save else []
        self._measure(num_scheduled, requests, work)
        return work

    def report(self, report: Report | None) -> None:
        """Hear what the workers have done."""
        self._num_steps = max(0, self._num_steps - 1)
        if self._measured is not None and self._num_steps == 0:
            work, started = self._measured
            self._cost.observe(work, time.perf_counter() - started)
            self._measured = None
        if report is None:
            return
        self._note(report.changes)
        for request_id in report.brought:
            if request_id in self._known:
                self._known[request_id].waits = False
        for verdict in report.verdicts:
            self._judge(verdict)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Blocks were filled, or given up."""
        for request_id in request_ids:
            if request_id in self._known:
                self._known[request_id].loads = False

    def finish(self, request: VLLMRequest) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks are still needed, and what to tell its caller."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return False, None
        self._count(request, known)
        answer = {"kvboost": known.provenance()}
        if known.loads:
            return False, answer  # vLLM itself waits for the load
        # The last token of an answer was chosen, not read; steps ahead may have counted more.
        num_read = max(request.num_prompt_tokens, request.num_tokens - 1)
        num_rows = min(num_read, request.num_computed_tokens)
        audit = self._audit(request, known, num_rows)
        if audit is not None:
            self._work.audits.append(audit)
            return True, answer
        save = self._save(request, known, num_rows, is_last=True)
        self._work.saves += [save] if save else []
        return save is not None, answer

    @property
    def is_busy(self) -> bool:
        """Whether blocks will be given back soon."""
        return bool(self._audited)

    def _find(self, request: VLLMRequest, num_local: int, known: _Known) -> tuple[ReusePlan, float]:
        """What of a prompt is worth taking from the store, and how much of it to repair."""
        space = namespace(self._facts.fingerprint, known.tenant, None)
        chunks = split(list(request.all_token_ids), self._options.chunk_size)
        whole = find(chunks, derive(chunks, space), self._index)
        exact = _after(whole, num_local)
        allowance = self.guard.terms(known.tenant)
        if known.reuse != "auto" or self._facts.move_refusal or not allowance.allows_moved:
            return exact, 0.0
        found = _after(find_moved(whole, chunks, self._index, space), num_local)
        num_hashed = len(request.block_hashes) * self._hash_block_size
        if found.moved and found.moved[0].start >= num_hashed:
            return exact, 0.0  # vLLM hashes its block later, when it cannot be set apart any more
        num_repaired = self._repairs[allowance.ratio].expected_rows(found)
        pays = self._cost.pays(
            _work(found, num_local, num_repaired), _work(exact, num_local, 0), MOVED_GAIN
        )
        return (found, allowance.ratio) if pays else (exact, 0.0)

    def _set_apart(self, request: VLLMRequest, exact_stop: int) -> None:
        """Keep blocks with anything approximate out of vLLM's prefix cache.

        Hashes of later blocks go on from these, so nothing above them is found by others either.
        """
        nonce = os.urandom(16)
        for place in range(exact_stop // self._hash_block_size, len(request.block_hashes)):
            hashed = sha256(nonce + bytes(request.block_hashes[place]))
            request.block_hashes[place] = hashed.digest()

    def _save(
        self, request: VLLMRequest, known: _Known, num_rows: int, *, is_last: bool
    ) -> Save | None:
        stop = num_rows if known.exact_stop is None else min(num_rows, known.exact_stop)
        if stop < LEAST_TOKENS:
            return None
        tokens, blocks = list(request.all_token_ids[:stop]), self._blocks_of(request.request_id)
        return Save(request.request_id, tokens, known.tenant, list(blocks), is_last)

    def _audit(self, request: VLLMRequest, known: _Known, num_rows: int) -> Audit | None:
        num_answered = min(request.num_tokens - request.num_prompt_tokens, MOST_AUDITED)
        if known.exact_stop is None or num_answered < 1 or num_rows < request.num_prompt_tokens:
            return None
        if not self.guard.wants_audit(known.tenant):
            return None
        stop = request.num_prompt_tokens + num_answered
        self._audited[request.request_id] = (known.tenant, known.ratio)
        if stop > LONGEST_AUDIT or len(self._audited) > 1:
            self._judge(Verdict(request.request_id))
            return None
        return Audit(
            request_id=request.request_id,
            tokens=list(request.all_token_ids[:stop]),
            num_prompt=request.num_prompt_tokens,
            exact_stop=known.exact_stop,
            tenant=known.tenant,
            block_ids=list(self._blocks_of(request.request_id)),
            ratio=known.ratio,
        )

    def _judge(self, verdict: Verdict) -> None:
        if verdict.request_id not in self._audited:
            return  # another rank has said it already
        tenant, ratio = self._audited.pop(verdict.request_id)
        if verdict.kl is None:
            self.guard.abandon(tenant)
        else:
            log.info("audit: mean KL %.4f, top-1 %.2f", verdict.kl, verdict.top1)
            self.counts["audits"] += 1
            self.guard.record(tenant, ratio, verdict.kl, verdict.top1)

    def _note(self, changes: Iterable[Change]) -> None:
        """Follow the index of the workers."""
        for change in changes:
            if change.entry is None:
                self._index.remove(change.key)
            else:
                self._index.add(change.entry, change.anchors)

    def _measure(
        self, num_scheduled: Mapping[str, int], requests: Mapping[str, VLLMRequest], step: StepWork
    ) -> None:
        """Time steps that compute all that one request still needs, and nothing else."""
        self._num_steps += 1
        self._measured = None
        if len(num_scheduled) != 1 or self._num_steps > 1:
            return
        ((request_id, count),) = num_scheduled.items()
        known, request = self._known.get(request_id), requests.get(request_id)
        if known is None or request is None or count < LEAST_TOKENS:
            return
        load = next((each for each in step.loads if each.request_id == request_id), None)
        if load is None:
            num_computed = request.num_computed_tokens
            work = Work.of(num_computed + count, count, num_computed)
        else:
            work = _work(load.plan, load.start, len(load.repaired))
        self._measured = (work, time.perf_counter())

    def _count(self, request: VLLMRequest, known: _Known) -> None:
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += request.num_prompt_tokens
        self.counts["exact_tokens"] += known.num_exact
        self.counts["moved_tokens"] += known.num_moved
        self.counts["repaired_tokens"] += known.num_repaired


def _is_plain(request: VLLMRequest) -> bool:
    """Whether its K/V depends on its tokens and the base model alone."""
    is_text = not request.mm_features and request.prompt_embeds is None
    return is_text and request.lora_request is None


def _asked_for(params: Mapping[str, Any] | None, default: ReuseMode) -> ReuseMode:
    """What a request says of reuse; a mistake in it must not end the server, so it is logged."""
    asked = (params or {}).get("kvboost", {})
    try:
        for name in asked:
            if name not in REQUEST_OPTIONS:
                raise ConfigError(f"unknown option {name!r}{hint(name, REQUEST_OPTIONS)}")
        return check_reuse(asked.get("reuse", default))
    except (ConfigError, TypeError, AttributeError) as error:
        log.warning("kv_transfer_params['kvboost'] of a request: %s; nothing is reused", error)
        return "off"


def _after(plan: ReusePlan, start: int) -> ReusePlan:
    """A plan without what vLLM has itself, which are the tokens before `start`."""
    rest = (m.from_position(start) for m in plan.matches if m.span.stop > start)
    return ReusePlan(plan.num_tokens, tuple(rest))


def _work(plan: ReusePlan, num_local: int, num_repaired: int) -> Work:
    """What filling the rows of a prompt will do on top of vLLM's own and those of a plan."""
    num_placed = num_local + plan.num_reused
    num_rows = plan.num_tokens - num_placed + num_repaired
    return Work.of(plan.num_tokens, num_rows, num_placed)
