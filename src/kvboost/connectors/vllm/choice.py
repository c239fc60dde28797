"""Which stored K/V a prompt should load, by a copy of the workers' index. No tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvboost.config import Options
from kvboost.connectors.vllm.messages import Change, Facts
from kvboost.core import Chunk, FrameKey, Namespace, ReuseMode, ReusePlan
from kvboost.policy.cost import MOVED_GAIN, CostModel, Work
from kvboost.policy.guard import QualityGuard
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import LEAST_TOKENS, find, find_moved
from kvboost.reuse.repair import Repair
from kvboost.tiers.epochs import Epochs
from kvboost.tiers.index import ChunkIndex

EVERYBODY = ""
"""Whose answers are judged together: salts are made up by clients, without end."""


class Words:
    """Evidence for a repair strategy that goes by the prompt's tokens alone."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def deviation(self) -> npt.NDArray[np.float32]:
        """Not measured inside vLLM."""
        raise NotImplementedError

    attention = sensitivity = deviation


class Choice:
    """Plans reuse of what the workers hold, as far as cost model and guardrail allow it."""

    def __init__(self, options: Options, repairs: Mapping[float, Repair]) -> None:
        self._chunk_size, self._repairs = options.chunk_size, repairs
        self._same_company = options.company == "same"
        self.facts = Facts(b"", "no worker has said what it can", "", must_bring=False, changes=())
        self._index = ChunkIndex()
        self.epochs = Epochs()
        self.cost = CostModel()
        self.guard = QualityGuard(
            options.quality_budget, tuple(repairs), options.audit_ratio, options.changed_budget
        )
        self._measured: tuple[Work, float] | None = None  # and when it began
        self._num_steps = 0  # that have not ended

    def learn(self, facts: Facts) -> None:
        """Take the workers' facts."""
        self.facts = facts
        self.note(facts.changes, facts.epochs)

    def note(self, changes: Iterable[Change], epochs: Mapping[FrameKey, int]) -> None:
        """Follow the index of the workers, and the epochs that they know."""
        for key, epoch in epochs.items():
            self.epochs.learn(key, epoch)
        for change in changes:
            if change.entry is None:
                self._index.remove(change.key)
            else:
                self._index.add(change.entry, change.anchors)

    def has_all(self, tokens: Sequence[int], tenant: str) -> bool:
        """Whether the index has all of a prompt, so that no other tier can add anything."""
        return len(tokens) - self._exact(tokens, tenant)[0].num_reused < LEAST_TOKENS

    def best(
        self, tokens: Sequence[int], tenant: str, reuse: ReuseMode, num_local: int, last_moved: int
    ) -> tuple[ReusePlan, float]:
        """What to take after the first `num_local` tokens, and how much of it to repair.

        Moved text must begin before position `last_moved`.
        """
        whole, chunks, space = self._exact(tokens, tenant)
        exact = whole.after(num_local)
        allowance = self.guard.terms(EVERYBODY)
        if reuse != "auto" or self.facts.move_refusal or not allowance.allows_moved:
            return exact, 0.0
        found = find_moved(whole, chunks, self._index, space, same_company=self._same_company)
        found = found.after(num_local)
        if found.moved and found.moved[0].start >= last_moved:
            return exact, 0.0
        num_repaired = self._repairs[allowance.ratio].expected_rows(found)
        pays = self.cost.pays(
            work_of(found, num_local, num_repaired), work_of(exact, num_local, 0), MOVED_GAIN
        )
        return (found, allowance.ratio) if pays else (exact, 0.0)

    def repaired(self, plan: ReusePlan, ratio: float, tokens: Sequence[int]) -> list[int]:
        """Positions of moved text that are computed again."""
        return self._repairs[ratio].select(plan, Words(tokens)) if plan.moved else []

    def begin_step(self, work: Work | None, spent_s: float = 0.0) -> None:
        """A step starts; `work` is what it does, if the cost model can learn from it.

        `spent_s` was spent on that work already.
        """
        self._num_steps += 1
        is_alone = self._num_steps == 1
        self._measured = (work, time.perf_counter() - spent_s) if work and is_alone else None

    def end_step(self) -> None:
        """A step has ended; steps end in the order they began."""
        self._num_steps = max(0, self._num_steps - 1)
        if self._measured is not None:
            work, started = self._measured
            self.cost.observe(work, time.perf_counter() - started)
            self._measured = None

    def _exact(
        self, tokens: Sequence[int], tenant: str
    ) -> tuple[ReusePlan, list[Chunk], Namespace]:
        space = namespace(self.facts.fingerprint, tenant, None, epoch=self.epochs.of(tenant))
        chunks = split(tokens, self._chunk_size)
        return find(chunks, derive(chunks, space), self._index), chunks, space


def work_of(plan: ReusePlan, num_local: int, num_repaired: int) -> Work:
    """The work of filling the rows of a prompt, given vLLM's own and those of a plan."""
    num_placed = num_local + plan.num_reused
    num_rows = plan.num_tokens - num_placed + num_repaired
    return Work.of(plan.num_tokens, num_rows, num_placed)
