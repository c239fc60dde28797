"""The batch: each step decodes a token of every running request and prefills pieces of prompts.

A step is one forward for all requests in it, and a step of a guest: Transformers' `generate()` or
the scoring of continuations. Requests join when there is room and leave when they are done,
cancelled or late. Prompts are prefilled in pieces so that decoding does not wait long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvboost.build import Parts
from kvboost.core import Span
from kvboost.engine.batch.admission import Admission
from kvboost.engine.batch.live import LivePrompt, LivePrompts
from kvboost.engine.batch.member import Member, completion_of
from kvboost.engine.batch.pace import Pace
from kvboost.engine.batch.promotion import FollowUps
from kvboost.engine.batch.queue import StepTime
from kvboost.engine.prefill import decide, fill, keep, named_chunks
from kvboost.engine.report import count
from kvboost.engine.request import reuse_refusal, terms_of
from kvboost.engine.results import Completion
from kvboost.errors import DeadlineExceeded, KVBoostError
from kvboost.models.adapters import Adapter
from kvboost.models.packed import LEAST_SHARED, SHARED_STEP
from kvboost.models.pool import Run
from kvboost.models.sampling import Choice, choose
from kvboost.reuse.lookup import find

if TYPE_CHECKING:
    from kvboost.engine.worker import Idle
    from kvboost.models.packed import Segment

log = logging.getLogger(__name__)

POLL_S = 0.002  # how often to look whether a request that waits can start


class Batch:
    """Waiting and running requests. All methods on the engine's thread.

    `stats` and `is_busy` on any thread.
    """

    def __init__(self, parts: Parts, add_idle: Callable[[Idle], None]) -> None:
        self._parts, self._follow_ups = parts, FollowUps(add_idle)
        self._running: list[Member] = []
        self._admission = Admission(parts, self._running)
        self._waiting = self._admission.waiting
        self._live = LivePrompts()
        self._pace = Pace(parts.options.inter_token_target_ms)
        self._step_time = StepTime()
        self._num_steps = self._num_answers_stepped = self._num_preemptions = 0
        # Kept while an adapter is loaded: one that comes back at once must not go first each time.
        self._last_steps: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()

    def add(self, member: Member) -> None:
        """Queue a request."""
        self._waiting.add(member)

    def step(self) -> float | None:
        """Compute one step if there is work; returns in how many seconds to call again."""
        try:
            self._drop_unwanted()
            if self._is_gathering:
                return POLL_S
            while (member := self._admission.overflow()) is not None:
                self._preempt(member)
            for member in [each for each in self._running if each.has_grown]:
                self._reserve(member)
            self._admit()
            segments = self._next_segments()
            if segments:
                self._compute(segments)
            self._step_guest()
        except BaseException as error:  # nothing may end the thread: all requests would hang
            log.exception("the batch failed, and all its requests with it")
            for member in [*self._running, *self._waiting]:
                self._fail(member, error)
        if self._running:
            return 0.0
        return POLL_S if self._waiting else None  # for a tier

    @property
    def is_busy(self) -> bool:
        """Whether answers are running."""
        return bool(self._running)

    @property
    def _is_gathering(self) -> bool:
        """Whether an idle batch still waits for more requests (`batch_window_ms`)."""
        window_s = self._parts.options.batch_window_ms / 1e3
        if window_s == 0 or self._running or len(self._waiting) >= self._admission.most_running:
            return False
        calls = [each.request.started_at for each in self._waiting]
        return bool(calls) and time.perf_counter() - min(calls) < window_s

    def stats(self) -> dict[str, Any]:
        """Sizes now, and counts since the engine was made."""
        options, running = self._parts.options, list(self._running)
        used = self._parts.pool.stats()
        return {
            "num_running": len(running),
            "num_waiting": len(self._waiting),
            "max_batch_size": options.max_batch_size,
            "max_queue_size": options.max_queue_size,
            "num_steps": self._num_steps,
            "mean_batch_size": self._num_answers_stepped / max(1, self._num_steps),
            "preemptions": self._num_preemptions,
            "kv_bytes": used["used_bytes"],
            "kv_tokens": used["used_blocks"] * used["block_size"],
            "kv_capacity_tokens": self._parts.working_tokens,
            "pack_refusal": self._parts.model.pack_refusal,  # why it runs one by one, if so
        }

    def _drop_unwanted(self) -> None:
        now = time.perf_counter()
        for member in [*self._running, *self._waiting]:
            if member.ticket.is_cancelled:
                self._fail(member, CancelledError("cancelled by its caller"), keeps=True)
            elif member.deadline_at is not None and now > member.deadline_at:
                self._fail(member, DeadlineExceeded("not done in time"), keeps=True)

    def _admit(self) -> None:
        """Admit requests while their prompts fit into the next step, and a few more."""
        while True:
            prefills = [each for each in self._running if each.is_prefilling]
            num_pending = sum(len(each.pending) for each in prefills)
            is_full = num_pending >= self._room_for_prompts(prefills)
            chosen = self._admission.next(self._is_ready, is_full=is_full)
            if chosen is None:
                return
            member, preempted = chosen
            for each in preempted:
                self._preempt(each)
            self._waiting.take(member)
            try:
                self._join(member)
            except Exception as error:
                log.exception("a request could not be started")
                self._fail(member, error)

    def _preempt(self, member: Member) -> None:
        """Take a request out of the batch; it continues from its K/V in the store."""
        self._running.remove(member)
        self._live.remove(member.live)
        self._keep(member)
        member.suspend()
        self._waiting.put_back(member)
        self._num_preemptions += 1

    def _reserve(self, member: Member) -> None:
        """Reserve blocks for the next tokens of an output."""
        try:
            member.rows.make_room(member.num_reserved)
        except KVBoostError:  # pinned or warmed text holds the blocks
            self._preempt(member)

    def _is_ready(self, member: Member) -> bool:
        loading = member.request.loading
        is_loading = loading is not None and not loading.done()
        return not is_loading and not (self._running and self._waits_for_another(member))

    def _waits_for_another(self, member: Member) -> bool:
        """Whether a running request is prefilling most of what this one could then share."""
        other, num_common = self._find_same_prefix(member)
        if other is None or member.names is None or other.num_ready >= num_common:
            return False
        num_stored = find(*member.names, self._parts.store.index).num_reused
        num_known = max(num_stored, other.num_ready)
        return num_common - num_known > (len(member.context) - num_known) / 2

    def _find_same_prefix(self, member: Member) -> tuple[LivePrompt | None, int]:
        """A running prompt that this one could share rows with, and the length of their prefix."""
        request, parts = member.request, member.parts
        may_share = parts.model.joins and parts.piece_tokens is None and request.reuse != "off"
        if not may_share or self._admission.is_alone(member):
            return None, 0
        if member.names is None:
            chunks, keys, _ = named_chunks(member.context, parts, request.tenant)
            member.names = chunks, keys
        chunks, keys = member.names
        return self._live.find(keys, [chunk.span for chunk in chunks])

    def _join(self, member: Member) -> None:
        request, parts, context = member.request, member.parts, member.context
        member.joined_at = member.joined_at or time.perf_counter()
        member.note = reuse_refusal(request, parts.model, member.num_tokens)
        terms, note = terms_of(request, parts, is_refused=bool(member.note))
        member.terms, member.note = terms, member.note or note
        decision = decide(context, parts, terms, capacity=member.num_tokens)
        shared = [] if decision.plan.moved else self._shared_rows(member)
        if shared and member.names is not None:
            decision = decision.on_shared(*member.names, sum(b - a for a, b in shared))
        prefilled = fill(
            decision, context, parts, terms, member.num_reserved, request.brought, shared
        )
        rows = member.live.rows = prefilled.rows
        member.start(prefilled, is_whole=self._is_whole(member))
        self._running.append(member)
        if member.names is not None:
            chunks, keys = member.names
            exact = sum(chunk.span.stop <= rows.exact_stop for chunk in chunks)
            self._live.add(member.live, keys[:exact])

    def _shared_rows(self, member: Member) -> list[Run]:
        """Rows of a running request with the same prefix."""
        other, num_common = self._find_same_prefix(member)
        if other is None or other.rows is None or other.rows.pool is not self._parts.pool:
            return []
        most = min(num_common, other.num_ready, len(member.context) - 1)
        if most < LEAST_SHARED:
            return []
        return other.rows.runs(Span(0, most // SHARED_STEP * SHARED_STEP))

    def _next_segments(self) -> dict[Segment, Member]:
        """A token of each decoding request, then pieces of prompts: the oldest, then the shortest.

        All have one adapter, and tenants that have not used more time than others. Requests that
        sit this step out still limit its prompt tokens.
        """
        computed = [each for each in self._running if each.guest is None or each.is_prefilling]
        members = self._of_one_adapter(self._step_time.in_turn(computed))
        room = self._room_for_prompts([each for each in self._running if each.is_prefilling])
        computing = [each for each in members if each.is_prefilling]
        segments: dict[Segment, Member] = {}
        for member in [each for each in members if not each.is_prefilling]:
            self._add_piece(segments, member, 1)
        # Half of the room is for the oldest prompt, so that short ones cannot starve it.
        for member in computing[:1]:
            most = room if len(computing) == 1 else -(-room // 2)
            most = len(member.pending) if self._is_whole(member) else most
            room -= self._add_piece(segments, member, most)
        for member in sorted(computing[1:], key=lambda each: len(each.pending)):
            if room > 0:
                room -= self._add_piece(segments, member, room)
        return segments

    def _of_one_adapter(self, members: Sequence[Member]) -> Sequence[Member]:
        """The requests of the adapter that has waited longest for a step."""
        adapters = {each.request.adapter for each in members}
        if len(adapters) < 2:
            return members
        adapter = min(adapters, key=lambda each: self._last_steps.get(each, 0))
        return [each for each in members if each.request.adapter is adapter]

    def _room_for_prompts(self, computing: list[Member]) -> int:
        num_decoding = len(self._running) - len(computing)
        num_free = self._admission.most_running - len(self._running)
        num_waiting = len(computing) + min(len(self._waiting), num_free)
        if self._step_time.is_shared:  # neither a queue nor prompts slow other tenants down
            num_decoding, num_waiting = max(1, num_decoding), 0
        is_shared = self._step_time.may_be_shared
        return self._pace.prompt_tokens(num_decoding, num_waiting, is_shared=is_shared)

    def _is_whole(self, member: Member) -> bool:
        """Whether a prompt is prefilled in one piece: its bits or its rotation depend on that."""
        return self._parts.piece_tokens is not None or self._admission.is_alone(member)

    def _add_piece(self, segments: dict[Segment, Member], member: Member, most: int) -> int:
        member.is_timed &= len(self._running) == 1
        try:
            segment = member.next_segment(most)
        except Exception as error:
            log.exception("a request's next step could not be prepared")
            self._fail(member, error)
            return 0
        segments[segment] = member
        return len(segment.tokens)

    def _compute(self, segments: dict[Segment, Member]) -> None:
        started = time.perf_counter()
        num_answers = sum(s.guest is None and not s.pending for s in segments.values())
        num_prompt = sum(len(g.tokens) for g, s in segments.items() if not s.is_decoding)
        num_decoding = sum(s.is_decoding for s in segments.values())
        outcomes = self._run(segments)
        for segment, member in segments.items():
            outcome = outcomes[segment]
            if isinstance(outcome, Exception):
                log.error("a request failed", exc_info=outcome)
                self._fail(member, outcome)
                continue
            if not member.is_decoding:
                member.note_ready()
            if outcome is not None:
                self._go_on(member, outcome)
        self._num_steps += 1
        self._last_steps[next(iter(segments.values())).request.adapter] = self._num_steps
        self._num_answers_stepped += num_answers
        seconds = time.perf_counter() - started
        self._step_time.charge(seconds, [(s.request.tenant, g.tokens) for g, s in segments.items()])
        self._pace.observe(seconds, num_decoding, num_prompt)

    def _run(self, segments: dict[Segment, Member]) -> dict[Segment, Choice | Exception | None]:
        """The next token of each request, None if its prompt is not done, or its error.

        If a step fails, its requests run one by one, and only those that fail alone fail.
        """
        try:
            return _run_together(segments)
        except Exception as error:
            if len(segments) == 1:
                return dict.fromkeys(segments, error)
            log.exception("a step failed; its requests run one by one")
        outcomes: dict[Segment, Choice | Exception | None] = {}
        for segment, member in segments.items():
            segment.rewind()
            outcomes |= self._run({segment: member})
        return outcomes

    def _step_guest(self) -> None:
        """One step of one guest; guests take turns."""
        ready = ((s, s.guest) for s in self._running if not s.is_prefilling)
        member, guest = next((pair for pair in ready if pair[1] is not None), (None, None))
        if member is None or guest is None:
            return
        self._running.remove(member)
        self._running.append(member)
        member.is_timed &= len(self._running) == 1
        member.steps = member.steps or guest.steps(member)
        completion = None
        try:
            is_over = next(member.steps, self) is self
            if not member.is_decoding:
                self._prompt_is_done(member)
            if not (is_over and member.is_decoding):
                member.note_token()
            if is_over:
                completion = completion_of(member)
        except BaseException as error:
            self._fail(member, error)
            return
        if completion is not None:
            self._finish(member, completion)

    def _go_on(self, member: Member, choice: Choice) -> None:
        if not member.is_decoding:
            self._prompt_is_done(member)
        completion = None
        try:
            member.accept(choice)
            if member.finish_reason is not None:
                completion = completion_of(member)
        except BaseException as error:  # of its own listener, grammar or tokenizer
            log.exception("a request failed while decoding")
            self._fail(member, error)
            return
        if completion is not None:
            self._finish(member, completion)

    def _prompt_is_done(self, member: Member) -> None:
        prefilled = member.prefilled
        assert prefilled is not None
        self._keep(member, num_tokens=member.rows.exact_stop)  # others can hit it now
        if member.is_timed:
            self._parts.cost.observe(prefilled.work, time.perf_counter() - prefilled.started_at)

    def _finish(self, member: Member, completion: Completion) -> None:
        self._leave(member)
        try:
            member.ticket.future.set_result(completion)
            looked_up = member.terms.reuse != "off"
            count(member.request, member.first_prefill, member.parts, looked_up=looked_up)
            if looked_up:
                self._follow_ups.add(member)  # before `_keep`: an audit runs its rows again
            self._keep(member)
        except Exception:
            log.exception("storing a request's K/V failed; its output is not affected")
        finally:
            member.live.close()

    def _keep(self, member: Member, num_tokens: int | None = None) -> None:
        """Store the K/V that a request has computed so far, or that of its first tokens."""
        request, parts, prefilled = member.request, member.parts, member.prefilled
        if prefilled is None or member.terms.reuse == "off":
            return
        tokens = [*request.tokens, *member.output][: member.num_computed][:num_tokens]
        if parts.piece_tokens is not None:
            tokens = request.tokens[: prefilled.pending[0]]
        try:
            if tokens:
                keep(prefilled, tokens, parts, tenant=request.tenant)
        except Exception:
            log.exception("K/V could not be stored; the request is not affected")

    def _fail(self, member: Member, error: BaseException, *, keeps: bool = False) -> None:
        """End a request with an error; `keeps` its K/V, so that a retry continues from there."""
        self._leave(member)
        # Its traceback, which was logged, would keep the K/V of all requests of the step alive.
        member.ticket.future.set_exception(error.with_traceback(None))
        if keeps:
            self._keep(member)
        member.live.close()

    def _leave(self, member: Member) -> None:
        """Release what a request holds in the batch, before its caller learns that it has ended."""
        if member in self._running:
            self._running.remove(member)
        elif member in self._waiting:
            self._waiting.remove(member)
        if member.steps is not None:
            member.steps.close()
        self._live.remove(member.live)
        member.request.stop_loading()
        member.release_capacity()


def _run_together(segments: dict[Segment, Member]) -> dict[Segment, Choice | Exception | None]:
    model = next(iter(segments.values())).parts.model
    logits = model.forward_packed(list(segments))
    ready = [g for g, member in segments.items() if not member.pending and member.guest is None]
    choosers = [segments[segment].chooser for segment in ready]
    choices = choose([logits[segment] for segment in ready], choosers) if ready else []
    if not ready:
        model.wait()
    return dict.fromkeys(segments) | dict(zip(ready, choices, strict=True))
