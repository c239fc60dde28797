"""Chooses the stored K/V a prompt should load, by a copy of the workers' index. No tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvboost.config import Options
from kvboost.connectors.vllm.messages import Change, Facts
from kvboost.core import Chunk, ChunkKeys, FrameKey, Namespace, ReuseMode, ReusePlan
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

    attention = deviation


@dataclass
class Prompt:
    """A prompt's tokens as they were split and hashed, and the plan that was last made for it."""

    tokens: list[int]
    chunks: list[Chunk]
    keys: list[ChunkKeys]
    space: Namespace
    asked: object = None  # what the plan depends on
    found: tuple[ReusePlan, float] | None = None


class Choice:
    """Plans reuse of the workers' chunks, within cost model and guardrail."""

    def __init__(self, options: Options, repairs: Mapping[float, Repair]) -> None:
        self._chunk_size, self._repairs = options.chunk_size, repairs
        self._same_company = options.company == "same"
        self.facts = Facts(b"", "no worker has started", "", must_prefetch=False, changes=())
        self._index = ChunkIndex()
        self.epochs = Epochs()
        self.cost = CostModel()
        self.guard = QualityGuard(
            options.quality_budget, tuple(repairs), options.audit_ratio, options.changed_budget
        )
        self._measured: tuple[Work, float] | None = None  # and when it began
        self._num_steps = 0  # that have not ended
        self.num_ranks = 1
        self._num_notes = 0  # how often the index has changed

    def learn(self, facts: Facts, num_ranks: int = 1) -> None:
        """Take the facts of the first rank, which stand for those of all."""
        self.facts, self.num_ranks = facts, num_ranks
        self.note(facts.changes, facts.epochs)

    def note(self, changes: Iterable[Change], epochs: Mapping[FrameKey, int]) -> None:
        """Follow the index of the workers, and the epochs that they know."""
        for key, epoch in epochs.items():
            self.epochs.learn(key, epoch)
        for change in changes:
            self._num_notes += 1
            if change.entry is None:
                self._index.remove(change.key)
            else:
                self._index.add(change.entry, change.anchors)

    def read(self, tokens: list[int], tenant: str) -> Prompt:
        """Split and hash a prompt: once, however often it is asked for."""
        space = self._space(tenant)
        chunks = split(tokens, self._chunk_size)
        return Prompt(tokens, chunks, derive(chunks, space), space)

    def is_current(self, prompt: Prompt, num_tokens: int, tenant: str) -> bool:
        """Whether a prompt that was read is still what it was."""
        return len(prompt.tokens) == num_tokens and prompt.space == self._space(tenant)

    def has_all(self, prompt: Prompt) -> bool:
        """Whether the index has all of a prompt, so that no other tier can add anything."""
        found = find(prompt.chunks, prompt.keys, self._index)
        return len(prompt.tokens) - found.num_reused < LEAST_TOKENS

    def best(
        self, prompt: Prompt, reuse: ReuseMode, num_local: int, last_moved: int
    ) -> tuple[ReusePlan, float]:
        """The plan after the first `num_local` tokens, and its repair ratio.

        Moved text must begin before position `last_moved`. Looked up again only when something has
        changed: vLLM asks in every step for a request that it has no room for.
        """
        allowance = self.guard.terms(EVERYBODY)
        is_moved = reuse == "auto" and not self.facts.move_refusal and allowance.allows_moved
        asked = self._num_notes, num_local, last_moved, is_moved, allowance.ratio
        if prompt.found is None or prompt.asked != asked:
            exact = find(prompt.chunks, prompt.keys, self._index)
            prompt.asked, prompt.found = asked, (exact.after(num_local), 0.0)
            if is_moved:
                prompt.found = self._best(prompt, exact, num_local, last_moved, allowance.ratio)
        return prompt.found

    def _best(
        self, prompt: Prompt, whole: ReusePlan, num_local: int, last_moved: int, ratio: float
    ) -> tuple[ReusePlan, float]:
        """The exact prefix, or that and moved text."""
        exact, chunks, space = whole.after(num_local), prompt.chunks, prompt.space
        found = find_moved(whole, chunks, self._index, space, same_company=self._same_company)
        found = self._known_to_all(found.after(num_local))
        if found.moved and found.moved[0].start >= last_moved:
            return exact, 0.0
        num_repaired = self._repairs[ratio].expected_rows(found)
        pays = self.cost.pays(
            work_of(found, num_local, num_repaired), work_of(exact, num_local, 0), MOVED_GAIN
        )
        return (found, ratio) if pays else (exact, 0.0)

    def chains(self, plan: ReusePlan) -> dict[FrameKey, tuple[FrameKey | None, bytes]]:
        """The chunks of a plan and all before them, if other ranks have to find theirs by them.

        Without those of which some chunk before them has left the store.
        """
        found: dict[FrameKey, tuple[FrameKey | None, bytes]] = {}
        if self.num_ranks == 1:
            return found
        for match in plan.matches:
            chain, entry = [], self._index.get(match.key)
            while entry is not None and entry.key not in found:
                chain.append(entry)
                before = self._index.before(entry)
                is_next = before is not None and before.home + before.num_tokens == entry.home
                entry = before if is_next else None
            if entry is not None or (chain and chain[-1].home == 0):
                found |= {each.key: (each.parent, each.tokens) for each in reversed(chain)}
        return found

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

    def _known_to_all(self, plan: ReusePlan) -> ReusePlan:
        """The matches of a plan that other ranks can find."""
        if self.num_ranks == 1:
            return plan
        chains = self.chains(plan)
        return replace(plan, matches=tuple(each for each in plan.matches if each.key in chains))

    def _space(self, tenant: str) -> Namespace:
        return namespace(self.facts.fingerprint, tenant, None, epoch=self.epochs.of(tenant))


def work_of(plan: ReusePlan, num_local: int, num_repaired: int) -> Work:
    """The work of filling the rows of a prompt, given vLLM's own and those of a plan."""
    num_placed = num_local + plan.num_reused
    num_rows = plan.num_tokens - num_placed + num_repaired
    return Work.of(plan.num_tokens, num_rows, num_placed)
