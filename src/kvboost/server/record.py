"""The record of a request: filled in while it is answered, read by telemetry at its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import pairwise

from kvboost.engine.results import Completion
from kvboost.server.problems import Problem, internal, problem_of

log = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """The facts of a request."""

    request_id: str
    endpoint: str = "other"  # the route, never the path as it came: it is a label of metrics
    tenant: str = ""
    model: str = ""
    status: int = 0  # 0: nothing was sent yet
    is_stream: bool = False
    started_at: float = field(default_factory=time.time)  # epoch seconds
    total_s: float = 0.0  # once it has ended
    error: str = ""  # OpenAI error type or code, empty if none
    finish_reason: str = ""  # "stop" | "length" | "tool_calls" | "cancelled" | ""
    completions: list[Completion] = field(default_factory=list)  # several for n > 1
    firsts: list[Completion] = field(default_factory=list)  # of these, one for each prompt
    num_cut_tokens: int = 0  # of answers that did not come to their end
    prompt_tokens: int = 0  # of all prompts, each counted once
    traceparent: str = ""  # the W3C header of the request
    _arrived_at: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._arrived_at

    @property
    def is_error(self) -> bool:
        """Whether something went wrong, also after a stream had started with status 200.

        A caller who disconnects causes no error.
        """
        return self.finish_reason != "cancelled" and (self.status >= 400 or bool(self.error))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for the first answer to each prompt."""
        return sum(each.cached_tokens for each in self.firsts)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers, whole or cut off."""
        return self.num_cut_tokens + sum(len(answer.token_ids) for answer in self.completions)

    @property
    def first_token_s(self) -> list[float]:
        """Time to first token of each answer."""
        return [answer.token_times[0] for answer in self.completions if answer.token_times]

    @property
    def gaps_s(self) -> list[list[float]]:
        """Inter-token latencies of each answer."""
        return [[b - a for a, b in pairwise(each.token_times)] for each in self.completions]

    def fail(self, error: Exception) -> Problem:
        """Record an error; returns what the client is told of it."""
        problem = problem_of(error)
        if problem is None:
            log.error("request %s failed", self.request_id, exc_info=error)
            problem = internal(self.request_id)
        self.error = problem.code or problem.kind
        return problem
