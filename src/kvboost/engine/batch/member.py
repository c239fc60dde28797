"""One request in the batch: what it has computed, what comes next, what its caller was told."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvboost.build import Parts
from kvboost.core import Chunk, ChunkKeys, FinishReason, Sampling, Span
from kvboost.engine.batch.live import LivePrompt
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.prefill import Prefilled, Terms
from kvboost.engine.report import report
from kvboost.engine.request import Request
from kvboost.engine.results import Completion, Delta, Phases, TokenLogprob, finish_reason
from kvboost.engine.stream import TextReader
from kvboost.models.packed import Segment
from kvboost.models.rows import Rows
from kvboost.models.sampling import Choice, Chooser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Listener = Callable[[Delta], None]

NEW_ROWS = 128  # of output for which room is reserved at a time


class Guest(Protocol):
    """Computes an output by forwards of its own, between the steps of the batch."""

    def steps(self, member: Member) -> Generator[None, None, None]:
        """Compute the rest of the prompt and the output; each step is a forward, or a few.

        The first one ends with the first token. The last one sets the member's `finish_reason`, and
        `output` and `text` if there are any.
        """


@dataclass(eq=False)
class Member:
    """State of a request; all of it belongs to the engine's thread but for the ticket."""

    request: Request
    parts: Parts  # of its adapter
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    release_capacity: Callable[[], None]  # of the batch and its queue
    guest: Guest | None = None
    listener: Listener | None = None
    deadline_at: float | None = None  # by `time.perf_counter`
    names: tuple[list[Chunk], list[ChunkKeys]] | None = None  # of its context
    live: LivePrompt = field(default_factory=LivePrompt)
    num_passed: int = 0  # requests that joined before it because it did not fit

    # Since it joined the batch.
    terms: Terms = field(init=False)
    note: str = ""
    joined_at: float = 0.0  # for the first time
    context: list[int] = field(init=False)  # what is prefilled: the prompt, and earlier output
    first_prefill: Prefilled | None = None  # for reports
    prefilled: Prefilled | None = None  # None before it joins, and while it is preempted
    pending: list[int] = field(default_factory=list)  # positions of the context, in order
    is_decoding: bool = False
    num_left: int = 0  # tokens of the prompt that its guest computes
    steps: Generator[None, None, None] | None = None  # of its guest, once these begin
    is_timed: bool = True  # whether its prefill has the model for itself
    output: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.ticket = Ticket(self.request.cancelled)
        self.context = self.request.tokens
        self.chooser = Chooser(self.sampling, self.request.tokens)
        self._reader = TextReader(self.tokenizer, self.sampling.stop)

    @property
    def num_tokens(self) -> int:
        """The most tokens of prompt and output."""
        return len(self.request.tokens) + self.sampling.max_new_tokens

    @property
    def num_reserved(self) -> int:
        """Tokens for which it reserves blocks; grows with its output.

        A guest reserves all at once.
        """
        if self.guest is not None:
            return self.num_tokens
        num_new = (len(self.output) // NEW_ROWS + 1) * NEW_ROWS
        return len(self.request.tokens) + min(num_new, self.sampling.max_new_tokens)

    @property
    def has_grown(self) -> bool:
        """Whether its last token made it reserve more."""
        is_growing = self.is_decoding and self.guest is None
        return is_growing and len(self.output) % NEW_ROWS == 0

    @property
    def is_prefilling(self) -> bool:
        """Whether the batch computes some of its prompt."""
        return len(self.pending) > self.num_left

    @property
    def rows(self) -> Rows:
        """Its K/V."""
        assert self.prefilled is not None
        return self.prefilled.rows

    @property
    def num_computed(self) -> int:
        """Length of the prefix whose K/V is computed."""
        return self.pending[0] if self.pending else self.rows.length

    def start(self, prefilled: Prefilled, *, is_whole: bool) -> None:
        """Join the batch; `is_whole`: the rest of the prompt must not be cut."""
        self.prefilled, self.pending = prefilled, list(prefilled.pending)
        if self.guest is not None:
            self.num_left = len(self.pending) if is_whole else 1
        self.first_prefill = self.first_prefill or prefilled
        self.note_ready()

    def suspend(self) -> None:
        """Leave the batch until there is room again; the output so far will be prefilled."""
        self.live.close()
        self.live, self.names = LivePrompt(), None
        self.context = [*self.request.tokens, *self.output]
        self.prefilled, self.pending, self.is_decoding = None, [], False

    def note_ready(self) -> None:
        """Let others share what is computed of the prompt, as far as it is exact."""
        num_computed = min(self.num_computed, len(self.context))
        self.live.num_ready = min(num_computed, self.rows.exact_stop)

    def next_segment(self, most: int) -> Segment:
        """Its part of the next step: at most `most` tokens of its prompt, or one output token."""
        if not self.pending:
            position = self.rows.length
            return Segment(self.rows, self.output[-1:], range(position, position + 1))
        positions, spans = self.take(min(most, len(self.pending) - self.num_left))
        return Segment(self.rows, [self.context[each] for each in positions], positions, spans)

    def take(self, most: int) -> tuple[Sequence[int], list[Span]]:
        """The next positions of the prompt, and the moved text whose other rows these correct."""
        positions, self.pending = self.pending[:most], self.pending[most:]
        limits = Span(positions[0], positions[-1] + 1)
        assert self.prefilled is not None
        spans = [part for span in self.prefilled.corrected if len(part := span.within(limits))]
        is_run = len(limits) == len(positions)
        return range(limits.start, limits.stop) if is_run else positions, spans

    def accept(self, choice: Choice) -> None:
        """Append a chosen token, tell the caller, and check whether the output ends."""
        token = choice.token
        self.note_token()
        self.output.append(token)
        self.chooser.accept(token)
        grammar = self.sampling.grammar
        is_end = token in self.end_tokens and not self.sampling.ignore_eos
        text = "" if is_end else self._reader.feed(token)
        is_over = is_end or (grammar is not None and grammar.is_over)
        if is_over or len(self.output) >= self.sampling.max_new_tokens:
            text += self._reader.finish()
        self.finish_reason = finish_reason(
            len(self.output),
            self.sampling.max_new_tokens,
            is_stopped=is_over or self._reader.is_stopped,
        )
        self.text += text
        logprobs = () if self.sampling.top_logprobs is None else (self._reported(choice),)
        self.logprobs += logprobs
        if self.listener is not None:
            self.listener(Delta(text, (token,), logprobs))

    def note_token(self) -> None:
        """Record the time of a token."""
        self.is_decoding = True
        self.token_times.append(time.perf_counter() - self.request.started_at)

    def _reported(self, choice: Choice) -> TokenLogprob:
        top = tuple((token, self._word(token), value) for token, value in choice.top)
        return TokenLogprob(choice.token, self._word(choice.token), choice.logprob, top)

    def _word(self, token: int) -> str:
        word: str = self.tokenizer.decode([token])
        return word


def completion_of(member: Member) -> Completion:
    """What the caller gets of a request that is done."""
    request, prefilled = member.request, member.first_prefill
    assert prefilled is not None and member.finish_reason is not None
    first_at, last_at = (request.started_at + member.token_times[i] for i in (0, -1))
    lookup_s, load_s = prefilled.lookup_ms / 1e3, prefilled.load_ms / 1e3
    return Completion(
        text=member.text,
        token_ids=tuple(member.output),
        finish_reason=member.finish_reason,
        prompt_tokens=len(request.tokens),
        cached_tokens=prefilled.num_cached,
        reuse=report(prefilled, len(request.tokens), member.parts, member.note, first_at),
        phases=Phases(
            queue=member.joined_at - request.started_at,
            lookup=lookup_s,
            load=load_s,
            prefill=first_at - member.joined_at - lookup_s - load_s,
            decode=last_at - first_at,
        ),
        logprobs=tuple(member.logprobs),
        token_times=tuple(member.token_times),
    )
