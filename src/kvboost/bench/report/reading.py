"""Reads results.jsonl into typed lines."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from kvboost.bench.report.names import (
    BASELINE,
    PHASES,
    POOLED,
    place,
    system_place,
    workload_place,
)
from kvboost.errors import KVBoostError

_Line = TypeVar("_Line")


@dataclass(frozen=True)
class Run:
    """What was run, where and of which code."""

    model: str = "?"
    dtype: str = "?"
    seed: int = 0
    rounds: int = 0
    seconds: float = 0.0
    commit: str = "?"
    date: str = "?"
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_quick: bool = False


@dataclass(frozen=True)
class SystemLine:
    """A system that took part."""

    system: str
    title: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """A system that did not take part."""

    system: str
    title: str
    why: str


@dataclass(frozen=True)
class Measure:
    """A system against a baseline: one workload, one phase, one metric."""

    workload: str
    phase: str
    system: str
    baseline: str
    metric: str
    system_ms: float
    baseline_ms: float
    ratio: float
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    top1: float | None = None
    baseline_top1: float | None = None
    score: float | None = None
    baseline_score: float | None = None
    prompt_tokens: float | None = None


@dataclass(frozen=True)
class Stages:
    """Where the time of an answer goes: medians of stages that follow each other."""

    workload: str
    phase: str
    system: str
    stages_ms: Mapping[str, float]
    total_ms: float
    covered: float | None = None
    least_covered: float | None = None
    answers: int = 0


@dataclass(frozen=True)
class Traffic:
    """Percentiles of a system under requests that arrive by a plan."""

    system: str
    requests: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    total_p50_ms: float
    total_p95_ms: float
    seconds: float = 0.0
    repeats: int = 1


@dataclass(frozen=True)
class Results:
    """All lines of a run."""

    run: Run
    systems: tuple[SystemLine, ...]
    absent: tuple[Absent, ...]
    measures: tuple[Measure, ...]
    stages: tuple[Stages, ...]
    traffic: tuple[Traffic, ...]
    questions: tuple[Mapping[str, Any], ...]

    @cached_property
    def _measures(self) -> dict[tuple[str, ...], Measure]:
        return {(m.workload, m.phase, m.metric, m.system, m.baseline): m for m in self.measures}

    def find(
        self, workload: str, phase: str, metric: str, system: str, baseline: str = BASELINE
    ) -> Measure | None:
        """Return the line of a comparison, or None."""
        return self._measures.get((workload, phase, metric, system, baseline))

    def bare(self, workload: str, phase: str, metric: str) -> Measure | None:
        """Return the line with the most pairs against the baseline: its side is the baseline's."""
        lines = [
            m
            for m in self.measures
            if (m.workload, m.phase, m.metric, m.baseline) == (workload, phase, metric, BASELINE)
        ]
        return max(lines, key=lambda m: m.pairs, default=None)

    def asked(self, question: str) -> list[Mapping[str, Any]]:
        """Return the rows of a question."""
        return [row for row in self.questions if row.get("question") == question]

    def title(self, system: str) -> str:
        """Return the title of a system."""
        return next((s.title for s in self.systems if s.system == system), system)

    @cached_property
    def measured(self) -> list[str]:
        """Systems with measures, the baseline among them, in the report's order."""
        names = {m.system for m in self.measures} | {m.baseline for m in self.measures}
        return sorted(names, key=system_place)

    @cached_property
    def workloads(self) -> list[str]:
        """Workloads with measures, without the pooled one, in the report's order."""
        names = {m.workload for m in self.measures} - {POOLED}
        return sorted(names, key=workload_place)

    def phases(self, workload: str) -> list[str]:
        """Return the phases that a workload has."""
        names = {m.phase for m in self.measures if m.workload == workload}
        return sorted(names, key=lambda name: place(name, PHASES))


def read_results(path: Path) -> Results:
    """Read results.jsonl.

    Raises:
        KVBoostError: The file is not there, or a line of it is damaged.
    """
    if not path.is_file():
        raise KVBoostError(f"{path.name} is not in {path.parent}: run the benchmark there first")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text.strip():
            line = _parsed(text, path, number)
            kinds.setdefault(line["kind"], []).append(line)
    try:
        return Results(
            run=(_typed(Run, kinds.get("run", [])) or (Run(),))[-1],
            systems=_typed(SystemLine, kinds.get("system", [])),
            absent=_typed(Absent, kinds.get("absent", [])),
            measures=_typed(Measure, kinds.get("measure", [])),
            stages=_typed(Stages, kinds.get("stages", [])),
            traffic=_typed(Traffic, kinds.get("traffic", [])),
            questions=tuple(kinds.get("question", [])),
        )
    except TypeError as error:
        message = f"{path.name} lacks fields ({error}): make it from raw.jsonl again"
        raise KVBoostError(message) from error


def _parsed(text: str, path: Path, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or "kind" not in line:
        raise KVBoostError(f"line {number} of {path.name} is damaged: make it from raw.jsonl again")
    return line


def _typed(cls: type[_Line], lines: Iterable[Mapping[str, Any]]) -> tuple[_Line, ...]:
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return tuple(cls(**{k: v for k, v in line.items() if k in names}) for line in lines)
