"""Sections on the run itself: what was measured, who is absent, how to do it again."""

from collections.abc import Mapping
from typing import Any

from kvboost.bench import names, systems
from kvboost.bench.report.reading import OURS, Line, Results, by_system
from kvboost.bench.report.section import Part, Section, Table, counted, plain

_USUAL = {
    "systems": (tuple(systems.SYSTEMS), names.QUICK_SYSTEMS),
    "workloads": (names.WORKLOADS, names.QUICK_WORKLOADS),
    "questions": (names.QUESTIONS, names.QUICK_QUESTIONS),
}
"""What a run takes when it is not told: all, and when it is quick."""


def measured(results: Results) -> Section:
    """Return the section on what was measured, and where."""
    run, seconds = results.run, results.run["seconds"]
    ordered = sorted(results.systems, key=lambda s: by_system(s["system"]))
    rows = [(s["system"], s["title"], _setting(s["versions"])) for s in ordered]
    columns = ("system", "what it is", "versions")
    quick = " This was a quick run: its intervals are wide or missing." if run["is_quick"] else ""
    took = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
    return Section(
        "measured",
        "What was measured",
        f"{run['model']} in {run['dtype']} on {machine(run['machine'])}:"
        f" {counted(len(results.measured), 'system')},"
        f" {counted(len(results.workloads), 'workload')},"
        f" {counted(run['rounds'], 'round')}{f', {took}' if seconds else ''}.{quick}",
        [Part(table=Table(columns, rows, marked=OURS))] if rows else [],
        "The whole report uses the names of the first column. Not every system computes in the"
        " same precision: if its title names one, its times and top-1 are for that precision.",
        "Our systems are in the accent colour.",
    )


def machine(facts: Mapping[str, Any]) -> str:
    """Write a machine in words."""
    units = {"cpu": "", "cores": " cores", "memory_gb": " GB", "gpu": "", "os": ""}
    words = [f"{facts[name]}{unit}" for name, unit in units.items() if facts.get(name)]
    return ", ".join(words) or "an unnamed machine"


def absent(results: Results) -> Section | None:
    """Return the section on systems that did not take part, or not to the end."""
    ordered = sorted(results.absent, key=lambda a: by_system(a["system"]))
    rows = [(a["system"], a["title"], a["why"].partition("; its log")[0]) for a in ordered]
    if not rows:
        return None
    return Section(
        "absent",
        "Absent systems",
        f"{counted(len(rows), 'system')} {'is' if len(rows) == 1 else 'are'} missing or stopped"
        " early.",
        [Part(table=Table(("system", "what it is", "why"), rows))],
        "Results from before a system stopped are shown workload by workload, not pooled.",
    )


def reproduce(results: Results) -> Section:
    """Return the section on how to get these figures again."""
    run = results.run
    names = ("model", "dtype", "seed", "rounds", "commit", "date")
    facts = {name: run[name] for name in names} | run["settings"]
    rows = [(name.replace("_", " "), _setting(value)) for name, value in facts.items()]
    return Section(
        "reproduce",
        "Reproduce it",
        f"Check out {run['commit']}, then run these lines."
        if run["commit"]
        else "Run these lines.",
        [
            Part(code=f"pip install .\nkvboost bench setup\n{_command(run)}"),
            Part(table=Table(("setting", "value"), rows)),
        ],
        "Pass your own files for model, GGUF and data. raw.jsonl has every output as measured,"
        " results.jsonl the data of this report. An interrupted run resumes where it stopped."
        " docs/benchmarks.md says how time is taken and pairs are made.",
    )


def _command(run: Line) -> str:
    settings = run["settings"]
    words = ["kvboost bench run", f"--model {run['model']}"]
    words += [f"--{name} {settings[name]}" for name in ("gguf", "data") if settings.get(name)]
    words += ["--quick"] if run["is_quick"] else []
    words += [f"--{name} {run[name]}" for name in ("dtype", "rounds", "seed")]
    for name, usual in _USUAL.items():
        chosen = tuple(settings.get(name, usual[run["is_quick"]]))
        words += [f"--{name}", *chosen] if chosen != usual[run["is_quick"]] else []
    return " ".join([*words, "--out bench"])


def _setting(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return plain(value) if isinstance(value, bool) or value is None else str(value)
