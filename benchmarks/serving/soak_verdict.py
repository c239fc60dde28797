"""What a load test saw, and whether that was all right."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

MAX_EXAMPLES = 20
ABORTED = 0  # instead of a status: we hung up ourselves, before or while the answer came
GAVE_UP = -1  # no answer, or half of one

EXPECTED = {
    "whole": {200, 503, 504},
    "stream": {200, 503, 504},
    "slow": {200, 503, 504},
    "burst": {200, 503, 504},
    "abort": {ABORTED, 503, 504},
    "deadline": {503, 504},
    "oversize": {413, ABORTED},  # the server may hang up on what it does not want to read
    "malformed": {400},
    "invalid": {400},
}
"""Statuses that each kind of request may have."""

MUST_HAPPEN = {
    "whole": 200,
    "stream": 200,
    "slow": 200,
    "burst": 503,
    "abort": ABORTED,
    "deadline": 504,
    "oversize": 413,
    "malformed": 400,
}
"""A status of some kind that must be seen at least once, or that kind tested nothing."""


@dataclass
class Tally:
    """Counts of what came back, and the first of what should not have."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_faults: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, kind: str, status: int, fault: str = "") -> None:
        """Note a request that is over; `fault` says what is wrong with its answer."""
        self.statuses[kind, status] += 1
        if status not in EXPECTED[kind]:
            fault = f"status {status}" + (f": {fault}" if fault else "")
        if fault:
            self.num_faults += 1
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(f"{kind}: {fault}")

    @property
    def num_requests(self) -> int:
        """All of them."""
        return sum(self.statuses.values())

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Counts of statuses for each kind, for a report."""
        kinds = sorted({kind for kind, _ in self.statuses})
        return {
            kind: {str(s): n for (k, s), n in sorted(self.statuses.items()) if k == kind}
            for kind in kinds
        }

    def violations(self) -> list[str]:
        """What was wrong, as sentences; empty if nothing was."""
        missing = [
            f"no {kind} request got a {status}: it tested nothing"
            for kind, status in MUST_HAPPEN.items()
            if any(k == kind for k, _ in self.statuses) and not self.statuses[kind, status]
        ]
        wrong = [f"{self.num_faults} wrong answers"] if self.num_faults else []
        return wrong + missing


def growth(samples: Sequence[float]) -> float:
    """Last third against the second third: 0.05 is 5 % more memory."""
    third = len(samples) // 3
    if third == 0:
        raise ValueError(f"{len(samples)} samples: too few for thirds")
    return statistics.mean(samples[2 * third :]) / statistics.mean(samples[third : 2 * third]) - 1


def fault_of(reply: httpx.Response) -> str:
    """What is wrong with an answer other than 200, empty if nothing is."""
    if "Traceback (most recent" in reply.text:
        return f"a stack trace: {reply.text[:200]}"
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = None
    if not message:
        return f"not an OpenAI error: {reply.text[:200]}"
    if reply.status_code == 503 and "retry-after" not in reply.headers:
        return "a 503 without Retry-After"
    return ""
