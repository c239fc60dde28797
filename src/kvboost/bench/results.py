"""From what was measured to what is said: pairs, ratios, quality, stages."""

from __future__ import annotations

import statistics as plain
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvboost.bench.records import Line
from kvboost.bench.report.reading import BASELINE, COMPARED_WITH_ALL, POOLED
from kvboost.bench.statistics import compare

CONNECTED = ("vllm-kvboost", "vllm")
METRICS = ("ttft", "total")
ABOUT = ("model", "dtype", "seed", "machine", "commit")
TRAFFIC_QUANTILES = (50, 95)


def results(raw: Sequence[Line]) -> list[Line]:
    """The lines of results.jsonl; `raw` are those of raw.jsonl."""
    run = _whole([line for line in raw if line["kind"] == "run"])
    verdicts = {
        (line["workload"], line["ask"], tuple(line["answer"])): line
        for line in raw
        if line["kind"] == "judged"
    }
    answers = [_judged(line, verdicts) for line in raw if line["kind"] == "answer"]
    about = {name: run[name] for name in ABOUT}
    versions = {line["system"]: line["versions"] for line in raw if line["kind"] == "system"}
    measured = [
        {**line, **about, "versions": _versions(line, versions)} for line in _measures(answers)
    ]
    questions = [line for line in raw if line["kind"] == "question"]
    return [run, *_systems(raw), *questions, *measured, *_stages(answers), *_traffic(raw)]


def _whole(parts: list[Line]) -> Line:
    """A run of all its parts: one, unless it was stopped."""
    commits = dict.fromkeys(part["commit"] for part in parts)
    seconds = sum(part["seconds"] for part in parts)
    return parts[-1] | {"seconds": seconds, "commit": " and ".join(commits)}


def _systems(raw: Sequence[Line]) -> list[Line]:
    """Of each system what was said last: that it ran, or why it is absent or broke off."""
    ran = {line["system"]: line for line in raw if line["kind"] == "system"}
    told = {line["system"]: line for line in raw if line["kind"] in ("system", "absent")}
    return [*ran.values(), *(line for line in told.values() if line["kind"] == "absent")]


def _judged(line: Line, verdicts: dict[tuple[str, int, tuple[int, ...]], Line]) -> Line:
    found = verdicts.get((line["workload"], line["ask"], tuple(line["answer"])), {})
    return line | {name: found.get(name) for name in ("top1", "regret", "score")}


def _measures(answers: list[Line]) -> Iterator[Line]:
    by_system: dict[str, dict[tuple[str, int, int], Line]] = defaultdict(dict)
    for line in answers:
        by_system[line["system"]][line["workload"], line["ask"], line["round"]] = line
    groups = sorted({(line["workload"], line["phase"]) for line in answers})
    groups += [(POOLED, phase) for phase in sorted({phase for _, phase in groups})]
    for system, baseline in _couples(list(by_system)):
        ours, theirs = by_system[system], by_system[baseline]
        shared = [(ours[key], theirs[key]) for key in ours if key in theirs]
        for workload, phase in groups:
            pairs = [
                pair
                for pair in shared
                if pair[0]["phase"] == phase and workload in (POOLED, pair[0]["workload"])
            ]
            # A system that broke off is not pooled: it was not asked what the others were.
            all_of_phase = {name for name, each in groups if each == phase and name != POOLED}
            if pairs and (workload != POOLED or _workloads(pairs) == all_of_phase):
                yield from _compared(workload, phase, system, baseline, pairs)


def _workloads(pairs: list[tuple[Line, Line]]) -> set[str]:
    return {ours["workload"] for ours, _ in pairs}


def _couples(systems: list[str]) -> Iterator[tuple[str, str]]:
    for system in systems:
        if system != BASELINE and BASELINE in systems:
            yield system, BASELINE
    for ours in COMPARED_WITH_ALL:
        if ours in systems:
            yield from ((ours, other) for other in systems if other not in (ours, BASELINE))
    if {*CONNECTED} <= {*systems}:
        yield CONNECTED


def _compared(
    workload: str, phase: str, system: str, baseline: str, pairs: list[tuple[Line, Line]]
) -> Iterator[Line]:
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    quality: dict[str, Any] = {
        "cached_share": _mean(
            line["num_cached"] / line["prompt_tokens"]
            for line in ours
            if line["num_cached"] is not None
        ),
        "prompt_tokens": round(plain.median(line["prompt_tokens"] for line in ours)),
    }
    for name in ("top1", "regret", "score"):
        quality[name] = _mean(line[name] for line in ours)
        quality[f"baseline_{name}"] = _mean(line[name] for line in theirs)
    for metric in METRICS:
        times = [(a[f"{metric}_ms"], b[f"{metric}_ms"]) for a, b in pairs]
        yield {
            "kind": "measure",
            "workload": workload,
            "phase": phase,
            "system": system,
            "baseline": baseline,
            "metric": metric,
            **compare(times),
            **quality,
        }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(plain.fmean(known), 4) if known else None


def _versions(line: Line, versions: dict[str, Any]) -> dict[str, Any]:
    return {name: versions.get(name, {}) for name in (line["system"], line["baseline"])}


def _stages(answers: list[Line]) -> Iterator[Line]:
    """Medians by stage, and how much of the caller's wall clock they make up."""
    groups: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in answers:
        if line["stages_ms"]:
            groups[line["workload"], line["phase"], line["system"]].append(line)
            groups[POOLED, line["phase"], line["system"]].append(line)
    for (workload, phase, system), lines in sorted(groups.items()):
        names = list(lines[0]["stages_ms"])
        covered = [sum(line["stages_ms"].values()) / line["total_ms"] for line in lines]
        yield {
            "kind": "stages",
            "workload": workload,
            "phase": phase,
            "system": system,
            "stages_ms": {
                name: round(plain.median(line["stages_ms"].get(name, 0.0) for line in lines), 3)
                for name in names
            },
            "total_ms": round(plain.median(line["total_ms"] for line in lines), 2),
            "covered": round(plain.median(covered), 4),
            "least_covered": round(min(covered), 4),
            "answers": len(lines),
        }


def _traffic(raw: Sequence[Line]) -> Iterator[Line]:
    by_system: dict[str, list[Line]] = defaultdict(list)
    for line in raw:
        if line["kind"] == "traffic":
            by_system[line["system"]].append(line)
    for system, lines in by_system.items():
        said: Line = {"kind": "traffic", "system": system, "repeats": len(lines)}
        said["requests"] = len(lines[0]["ttft_ms"])
        for metric in METRICS:
            times = [each for line in lines for each in line[f"{metric}_ms"]]
            for quantile in TRAFFIC_QUANTILES:
                value = round(float(np.percentile(times, quantile)), 1)
                said[f"{metric}_p{quantile}_ms"] = value
        said["seconds"] = round(plain.median(line["seconds"] for line in lines), 2)
        yield said
