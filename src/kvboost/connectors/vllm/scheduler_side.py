"""The side in vLLM's scheduler: how much of a prompt the workers can supply. No tensors.

It keeps a copy of the workers' index and decides by it; what turns out to be gone is computed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Protocol

from kvboost.config import Options, check_reuse, hint
from kvboost.connectors.vllm.choice import EVERYBODY, Choice, Prompt, work_of
from kvboost.connectors.vllm.messages import (
    Audit,
    Facts,
    Load,
    Prefetch,
    Report,
    Save,
    StepWork,
    Verdict,
)
from kvboost.core import ReuseMode, ReusePlan
from kvboost.errors import ConfigError
from kvboost.policy.cost import Work
from kvboost.reuse.lookup import LEAST_TOKENS
from kvboost.reuse.repair import Repair

log = logging.getLogger(__name__)

REQUEST_OPTIONS = ("reuse",)
"""What `kv_transfer_params={"kvboost": {...}}` of a request may set."""

MOST_AUDITED = 32  # tokens of an answer
LONGEST_AUDIT = 8192  # tokens of prompt and answer: blocks are held until it is done
AUDIT_PATIENCE_S = 10.0  # after which the next request ends it: it holds blocks
PROMOTION_PAUSE_S = 60.0  # after one that was given up


class VLLMRequest(Protocol):
    """The used part of vLLM's `Request`."""

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
    skip_reading_prefix_cache: bool


@dataclass
class _Known:
    """The state of a request that has not ended."""

    reuse: ReuseMode
    tenant: str
    epoch: int = 0  # of the tenant when it got its blocks
    num_prefetching: int = 0  # ranks that still do; it waits for them
    loads: bool = False  # blocks are being filled
    exact_stop: int | None = None  # rows from here on have something moved below them
    ratio: float = 0.0  # of moved tokens that are repaired
    moved_work: Work | None = None  # of a load of moved text and of the step after it
    moved_stop: int = 0  # where that step begins
    moved_s: float = 0.0  # that the load took
    to_load: tuple[int, int, ReusePlan] | None = None  # rows that were promised, and from where
    prompt: Prompt | None = None  # while it waits for blocks
    was_loaded: bool = False  # since it was preempted: if vLLM asks again, that has failed
    is_saved: bool = False  # its prompt, or it is on its way
    num_exact: int = 0
    num_moved: int = 0
    num_repaired: int = 0

    @property
    def waits(self) -> bool:
        """Whether it waits for K/V, and not for blocks."""
        return self.loads or self.num_prefetching > 0

    def count(self, num_exact: int, num_moved: int, num_repaired: int) -> None:
        """Record what of its prompt was reused."""
        self.num_exact, self.num_moved, self.num_repaired = num_exact, num_moved, num_repaired

    def provenance(self) -> dict[str, Any]:
        """What of its prompt was reused, for the response."""
        return {
            "provenance": "exact" if self.exact_stop is None else "approximate",
            "exact_tokens": self.num_exact,
            "moved_tokens": self.num_moved,
            "repaired_tokens": self.num_repaired,
        }


@dataclass
class _Audited:
    """An answer on moved text that workers prefill exactly."""

    ratio: float  # of moved tokens that were repaired
    since: float
    is_counted: bool  # its verdict is an audit's


class SchedulerSide:
    """Decides, request by request and step by step, what the workers load and save."""

    def __init__(
        self,
        options: Options,
        repairs: Mapping[float, Repair],
        blocks_of: Callable[[str], Sequence[int]],
        hash_block_size: int,
    ) -> None:
        """`blocks_of` returns a request's blocks; `hash_block_size`: tokens per block hash."""
        self._default, self._chunk_size = options.reuse, options.chunk_size
        self._promotes = options.promote
        self._blocks_of, self._hash_block_size = blocks_of, hash_block_size
        self._choice = Choice(options, repairs)
        self.guard = self._choice.guard
        self._known: dict[str, _Known] = {}
        self._work = StepWork()
        self._audited: dict[str, _Audited] = {}  # by request; at most one
        self._promote_at = 0.0  # not before
        self.counts: Counter[str] = Counter()  # since they were taken

    def learn(self, facts: Sequence[Facts]) -> None:
        """Take the facts of all workers once they have started.

        Each rank has keys of its own. All hold their part of the same chunks, so that the index of
        the first stands for all; what another rank turns out to miss is computed.
        """
        refusal = next((each.refusal for each in facts if each.refusal), "")
        move_refusal = next((each.move_refusal for each in facts if each.move_refusal), "")
        found = replace(facts[0], refusal=refusal, move_refusal=move_refusal)
        self._choice.learn(found, len(facts))
        if found.refusal:
            log.warning("KVBoost reuses nothing: %s", found.refusal)
        elif found.move_refusal:
            log.warning("KVBoost reuses exact text only: %s", found.move_refusal)
        else:
            log.info("KVBoost reuses exact text, and moved text for requests that allow it")

    def add(self, request: VLLMRequest) -> None:
        """Add a request."""
        facts = self._choice.facts
        if facts.refusal or not _is_plain(request):
            return
        reuse = _asked_for(request.kv_transfer_params, self._default)
        if reuse == "off":
            return
        known = _Known(reuse, request.cache_salt or "")
        self._known[request.request_id] = known
        if facts.must_prefetch and not self._choice.has_all(prompt := self._read(request, known)):
            known.num_prefetching = self._choice.num_ranks
            prefetch = Prefetch(request.request_id, prompt.tokens, known.tenant, known.reuse)
            self._work.prefetches.append(prefetch)

    def match(self, request: VLLMRequest, num_local: int) -> tuple[int | None, bool]:
        """How many tokens after the first `num_local` can be supplied; whether between steps.

        None: not known yet.
        """
        known = self._known.get(request.request_id)
        if known is None or known.was_loaded or request.skip_reading_prefix_cache:
            return 0, False
        if known.num_prefetching:
            return None, False
        # vLLM hashes a block once it is full: too late to set it apart.
        num_hashed = len(request.block_hashes) * self._hash_block_size
        plan, known.ratio = self._choice.best(
            self._read(request, known), known.reuse, num_local, num_hashed
        )
        stop = plan.matches[-1].span.stop if plan.matches else 0
        if stop - num_local < LEAST_TOKENS:
            known.to_load = None
            return 0, False
        known.to_load = (num_local, stop, plan)
        if plan.moved:
            self._set_apart(request, plan.moved[0].start)
        return stop - num_local, True

    def allocated(self, request: VLLMRequest, num_external: int) -> None:
        """A request got its blocks, also for the tokens to supply."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        known.prompt = None
        if not known.was_loaded:  # else its first rows may be from before a deletion
            known.epoch = self._choice.epochs.of(known.tenant)
        if known.to_load is None or num_external == 0:
            return
        (start, stop, plan), tokens = known.to_load, list(request.all_token_ids)
        known.to_load, known.loads, known.was_loaded = None, True, True
        if plan.moved:
            first = plan.moved[0].start
            known.exact_stop = first if known.exact_stop is None else min(first, known.exact_stop)
        load = Load(
            request_id=request.request_id,
            tokens=tokens,
            tenant=known.tenant,
            block_ids=list(self._blocks_of(request.request_id)),
            start=start,
            stop=stop,
            plan=plan,
            ratio=known.ratio,
            repaired=self._choice.repaired(plan, known.ratio, tokens),
            chains=self._choice.chains(plan) if plan.moved else {},
        )
        self._work.loads.append(load)
        known.moved_work = work_of(plan, start, len(load.repaired)) if plan.moved else None
        known.moved_stop = stop
        num_moved = sum(len(run) for run in plan.moved)
        known.count(plan.num_reused - num_moved, num_moved, len(load.repaired))

    def step(
        self,
        num_scheduled: Mapping[str, int],
        requests: Mapping[str, VLLMRequest],
        preempted: Iterable[str],
    ) -> StepWork:
        """The work beside a step that computes `num_scheduled` tokens of each request."""
        work, self._work = self._work, StepWork()
        work.preempted = set(preempted)
        work.is_idle = not num_scheduled
        work.is_quiet = work.is_idle and not requests
        if self._audited and not work.is_quiet:
            work.ends_audits = self._wants_blocks(work, requests)
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
        self._choice.begin_step(*self._measurable(num_scheduled, requests))
        return work

    def report(self, report: Report | None) -> None:
        """Take the workers' report after a step."""
        self._choice.end_step()
        if report is None:
            return
        self._choice.note(report.changes, report.epochs)
        for request_id in report.prefetched:
            if request_id in self._known:
                self._known[request_id].num_prefetching -= 1
        for request_id in report.failed:
            if request_id in self._known:
                self._known[request_id].count(0, 0, 0)
        for request_id, seconds in report.repairs_s.items():
            if request_id in self._known:
                self._known[request_id].moved_s = seconds
        for verdict in report.verdicts:
            self._judge(verdict)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Loads of these requests have ended."""
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

    def _read(self, request: VLLMRequest, known: _Known) -> Prompt:
        """A request's prompt, and after preemption its answer too."""
        prompt, count = known.prompt, request.num_tokens
        if prompt is None or not self._choice.is_current(prompt, count, known.tenant):
            prompt = known.prompt = self._choice.read(list(request.all_token_ids), known.tenant)
        return prompt

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
        if not is_last:  # the rest of a chunk is saved with the answer's first tokens
            stop -= stop % self._chunk_size
        if stop < LEAST_TOKENS:
            return None
        tokens, blocks = list(request.all_token_ids[:stop]), self._blocks_of(request.request_id)
        return Save(request.request_id, tokens, known.tenant, list(blocks), is_last, known.epoch)

    def _audit(self, request: VLLMRequest, known: _Known, num_rows: int) -> Audit | None:
        num_answered = min(request.num_tokens - request.num_prompt_tokens, MOST_AUDITED)
        if known.exact_stop is None or num_answered < 1 or num_rows < request.num_prompt_tokens:
            return None
        is_due = self.guard.wants_audit(EVERYBODY)
        if not (is_due or self._may_promote(request, known)):
            return None
        stop = request.num_prompt_tokens + num_answered
        running = next(iter(self._audited.values()), None)
        if running is not None or stop > LONGEST_AUDIT:
            if is_due and running is not None and not running.is_counted:
                running.is_counted = True  # it will tell as much
            elif is_due:
                self.guard.abandon(EVERYBODY)
            return None
        self._audited[request.request_id] = _Audited(known.ratio, time.monotonic(), is_due)
        return Audit(
            request_id=request.request_id,
            tokens=list(request.all_token_ids[:stop]),
            num_prompt=request.num_prompt_tokens,
            exact_stop=known.exact_stop,
            tenant=known.tenant,
            block_ids=list(self._blocks_of(request.request_id)),
            epoch=known.epoch,
        )

    def _may_promote(self, request: VLLMRequest, known: _Known) -> bool:
        """Whether to prefill an answer exactly that is not audited: nothing has done it yet."""
        is_free = not self._audited and time.monotonic() >= self._promote_at
        if not (self._promotes and is_free and request.num_prompt_tokens < LONGEST_AUDIT):
            return False
        prompt = list(request.all_token_ids[: request.num_prompt_tokens])
        return not self._choice.has_all(self._choice.read(prompt, known.tenant))

    def _wants_blocks(self, work: StepWork, requests: Iterable[str]) -> bool:
        """Whether requests want the blocks of the one that is audited, or it has them for long."""
        since = [each.since for each in self._audited.values()]
        if work.preempted or any(time.monotonic() - each > AUDIT_PATIENCE_S for each in since):
            return True
        served = {name for name, known in self._known.items() if known.waits}
        return work.is_idle and any(name not in served for name in requests)

    def _judge(self, verdict: Verdict) -> None:
        audited = self._audited.pop(verdict.request_id, None)
        if audited is None:
            return  # another rank has said it already
        if verdict.kl is None:
            self._promote_at = time.monotonic() + PROMOTION_PAUSE_S
        if not audited.is_counted:
            return
        if verdict.kl is None:
            self.guard.abandon(EVERYBODY)
            return
        log.info("audit: mean KL %.4f, top-1 %.2f", verdict.kl, verdict.top1)
        self.counts["audits"] += 1
        self.guard.record(EVERYBODY, audited.ratio, verdict.kl, verdict.top1)

    def _measurable(
        self, num_scheduled: Mapping[str, int], requests: Mapping[str, VLLMRequest]
    ) -> tuple[Work | None, float]:
        """The work of a step that only finishes the prompt of one request.

        And how much of the time for it was spent before the step.
        """
        if len(num_scheduled) != 1:
            return None, 0.0
        ((request_id, count),) = num_scheduled.items()
        known, request = self._known.get(request_id), requests.get(request_id)
        if known is None or request is None:
            return None, 0.0
        num_computed = request.num_computed_tokens
        if num_computed + count != request.num_prompt_tokens:
            return None, 0.0
        if known.moved_work is not None and num_computed == known.moved_stop:
            return known.moved_work, known.moved_s
        return Work.of(num_computed + count, count, num_computed), 0.0

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
    """A request's reuse option; a mistake in it is logged, since an error would end the server."""
    params = params or {}
    asked = params.get("kvboost", {})
    try:
        if not isinstance(asked, Mapping) or "reuse" in params:
            raise ConfigError(f'expected {{"kvboost": {{"reuse": ...}}}}, got {params}')
        for name in asked:
            if name not in REQUEST_OPTIONS:
                raise ConfigError(f"unknown option {name!r}{hint(name, REQUEST_OPTIONS)}")
        return check_reuse(asked.get("reuse", default))
    except ConfigError as error:
        log.warning("kv_transfer_params of a request: %s; nothing is reused", error)
        return "off"
