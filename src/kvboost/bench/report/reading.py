"""Reads results.jsonl; the order and the colours of what is in it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from kvboost.bench import records, systems
from kvboost.bench.names import WORKLOADS
from kvboost.errors import KVBoostError

Line: TypeAlias = Mapping[str, Any]

BASELINE = "transformers"
AGAIN = "transformers-again"
POOLED = "all"
MAIN = "kvboost-auto"
OURS = systems.OURS
COMPARED_WITH_ALL = ("kvboost-exact", "kvboost-auto")
SYSTEMS = (*OURS, *(name for name in systems.SYSTEMS if name not in OURS))
PHASES = {
    "cold": "nothing of the prompt is cached",
    "warm": "the prompt starts with a cached prefix",
    "moved": "the documents are cached, but from other positions",
}
METRICS = {"ttft": "first token", "total": "whole answer"}
STAGES = ("tokenize", "wait", "lookup", "load", "select", "forward", "decode")

# The page's style sheet gives each family its colour; the accent is ours alone.
_FAMILIES = ("transformers", "kvboost-public", "vllm", "llama")


class Results:
    """All lines of a run."""

    def __init__(self, lines: Sequence[Line]) -> None:
        def of(kind: str) -> list[Line]:
            return [line for line in lines if line["kind"] == kind]

        (self.run,) = of("run")
        self.systems, self.absent = of("system"), of("absent")
        self.measures, self.stages, self.traffic = of("measure"), of("stages"), of("traffic")
        self._questions = of("question")

    @cached_property
    def _measures(self) -> dict[tuple[str, ...], Line]:
        names = ("workload", "phase", "metric", "system", "baseline")
        return {tuple(m[name] for name in names): m for m in self.measures}

    def find(
        self, workload: str, phase: str, metric: str, system: str, baseline: str = BASELINE
    ) -> Line | None:
        """Return the line of a comparison, or None."""
        return self._measures.get((workload, phase, metric, system, baseline))

    def bare(self, workload: str, phase: str, metric: str) -> Line | None:
        """Return the line with the most pairs against the baseline: its side is the baseline's."""
        lines = (self.find(workload, phase, metric, system) for system in self.measured)
        return max((m for m in lines if m), key=lambda m: int(m["pairs"]), default=None)

    def asked(self, question: str, *names: str) -> list[Line]:
        """Return the rows of a question that have a value for each of the names."""
        return known([row for row in self._questions if row.get("question") == question], *names)

    @property
    def questions(self) -> list[str]:
        """The questions that were asked."""
        return [row["question"] for row in self._questions]

    def title(self, system: str) -> str:
        """Return the title of a system."""
        return next((str(s["title"]) for s in self.systems if s["system"] == system), system)

    @cached_property
    def measured(self) -> list[str]:
        """Systems with measures, the baseline among them, in the report's order."""
        return sorted({m[n] for m in self.measures for n in ("system", "baseline")}, key=by_system)

    @cached_property
    def workloads(self) -> list[str]:
        """Workloads with measures, without the pooled one, in the report's order."""
        return sorted({m["workload"] for m in self.measures} - {POOLED}, key=by_workload)

    def phases(self, workload: str) -> list[str]:
        """Return the phases that a workload has."""
        return sorted(
            {m["phase"] for m in self.measures if m["workload"] == workload}, key=by_phase
        )


def read_results(path: Path) -> Results:
    """Read results.jsonl, which `results` of `kvboost.bench.results` makes of raw.jsonl.

    Raises:
        KVBoostError: The file is not there.
    """
    if not path.is_file():
        raise KVBoostError(f"{path.name} is not in {path.parent}: run the benchmark there first")
    return Results(records.read(path))


def known(rows: Iterable[Line], *names: str) -> list[Line]:
    """Return the rows that have a value for each of the names."""
    return [row for row in rows if all(row.get(name) is not None for name in names)]


def grouped(
    rows: Iterable[Line], name: str, order: Callable[[Any], Any] | None = None
) -> dict[Any, list[Line]]:
    """Return the rows of each value of a field, in the order of the values."""
    groups: dict[Any, list[Line]] = {}
    for row in rows:
        groups.setdefault(row.get(name), []).append(row)
    return {value: groups[value] for value in sorted(groups, key=order)}


def family(system: str) -> str:
    """Return the style class of a system: ``ours``, or the family of a peer."""
    if system in OURS:
        return "ours"
    start = next((each for each in _FAMILIES if system.startswith(each)), "other")
    return start.removeprefix("kvboost-")


def place(name: str, order: Iterable[str]) -> tuple[int, str]:
    """Return a sorting key: the place in ``order``, names that are not in it last."""
    names = list(order)
    return (names.index(name) if name in names else len(names), name)


def by_system(system: str) -> tuple[int, str]:
    """Return the sorting key of a system."""
    return place(system, SYSTEMS)


def by_phase(phase: str) -> tuple[int, str]:
    """Return the sorting key of a phase."""
    return place(phase, PHASES)


def by_workload(workload: str) -> tuple[int, str]:
    """Return the sorting key of a workload: the pooled one first."""
    return place(workload, (POOLED, *WORKLOADS))
