"""Sections on the run itself: what was measured, who is absent, how to do it again, the clock."""

from collections.abc import Mapping
from typing import Any

from kvboost.bench import names, systems
from kvboost.bench.report.formats import counted, plain
from kvboost.bench.report.names import OURS, system_place
from kvboost.bench.report.reading import Results, Run
from kvboost.bench.report.section import Part, Row, Section, Table


def measured(results: Results) -> Section:
    """Return the section on what was measured, and where."""
    run = results.run
    rows = tuple(
        Row((s.system, s.title, _versions(s.versions)), s.system in OURS)
        for s in sorted(results.systems, key=lambda s: system_place(s.system))
    )
    quick = " This was a quick run: its intervals are wide or missing." if run.is_quick else ""
    return Section(
        "measured",
        "What was measured",
        f"{run.model} in {run.dtype} on {machine(run.machine)}:"
        f" {counted(len(results.measured), 'system')},"
        f" {counted(len(results.workloads), 'workload')},"
        f" {counted(run.rounds, 'round')}{_duration(run.seconds)}.{quick}",
        (Part(table=Table(("system", "what it is", "versions"), rows)),) if rows else (),
        "The whole report uses the names of the first column. Not every system computes in the"
        " same precision: if its title names one, its times and top-1 are for that precision.",
        "Our systems are in the accent colour.",
    )


def machine(facts: Mapping[str, Any]) -> str:
    """Write a machine in words."""
    words = [str(facts["cpu"])] if facts.get("cpu") else []
    words += [f"{facts['cores']} cores"] if facts.get("cores") else []
    words += [f"{plain(facts['memory_gb'])} GB"] if facts.get("memory_gb") else []
    words += [str(facts[name]) for name in ("gpu", "os") if facts.get(name)]
    return ", ".join(words) or "an unnamed machine"


def absent(results: Results) -> Section | None:
    """Return the section on systems that did not take part, or not to the end."""
    if not results.absent:
        return None
    rows = tuple(
        Row((a.system, a.title, a.why.partition("; its log")[0]))
        for a in sorted(results.absent, key=lambda a: system_place(a.system))
    )
    num = len(rows)
    return Section(
        "absent",
        "Absent systems",
        f"{counted(num, 'system')} {'is' if num == 1 else 'are'} missing or stopped early.",
        (Part(table=Table(("system", "what it is", "why"), rows)),),
        "Results from before a system stopped are shown workload by workload, not pooled.",
    )


def reproduce(results: Results) -> Section:
    """Return the section on how to get these figures again."""
    run = results.run
    facts = {
        "model": run.model,
        "dtype": run.dtype,
        "seed": run.seed,
        "rounds": run.rounds,
        "commit": run.commit,
        "date": run.date,
        **run.settings,
    }
    rows = tuple(Row((name.replace("_", " "), _setting(value))) for name, value in facts.items())
    return Section(
        "reproduce",
        "Reproduce it",
        f"Check out {run.commit}, then run these lines." if run.commit else "Run these lines.",
        (
            Part(code=f"pip install .\nkvboost bench setup\n{_command(results.run)}"),
            Part(table=Table(("setting", "value"), rows)),
        ),
        "Pass your own files for model, GGUF and data. raw.jsonl has every output as measured,"
        " results.jsonl the data of this report. An interrupted run resumes where it stopped.",
    )


def _command(run: Run) -> str:
    files = {name: run.settings.get(name) for name in ("gguf", "data")}
    words = ["kvboost bench run", f"--model {run.model}"]
    words += [f"--{name} {value}" for name, value in files.items() if value]
    words += ["--quick"] if run.is_quick else []
    words += [f"--dtype {run.dtype}", f"--rounds {run.rounds}", f"--seed {run.seed}"]
    for name, usual in _usual(is_quick=run.is_quick).items():
        chosen = tuple(run.settings.get(name, usual))
        words += [] if chosen == usual else [f"--{name}", *chosen]
    return " ".join([*words, "--out bench"])


def _usual(*, is_quick: bool) -> dict[str, tuple[str, ...]]:
    """Return what a run takes when it is not told."""
    if is_quick:
        return {
            "systems": names.QUICK_SYSTEMS,
            "workloads": names.QUICK_WORKLOADS,
            "questions": names.QUICK_QUESTIONS,
        }
    return {
        "systems": tuple(systems.SYSTEMS),
        "workloads": names.WORKLOADS,
        "questions": names.QUESTIONS,
    }


def clock() -> Section:
    """Return the section on how time is taken."""
    return Section(
        "clock",
        "How the clock works",
        "Each system is timed inside its own process, from just before the call to the first token"
        " and to the end of the output.",
        (
            Part(
                text=(
                    "Every system is a separate process that stays alive for the whole run. In each"
                    " workload and round the systems take turns in random order: each clears its"
                    " cache, then gets the same prompts, as the same token ids, in the same order.",
                    "The clock (time.perf_counter) starts just before the call and is read at the"
                    " first token and at the end of the output, with the device synchronised. It"
                    " does not include starting processes, loading models, or converting token ids"
                    " to text for systems that take only text. It does not include storing after an"
                    " output is delivered either: a system may finish that before the next prompt."
                    " Systems that store first have it in their total.",
                    "Outputs are greedy and of a fixed length. A ratio compares pairs, the same"
                    " prompt in the same round: the system's time divided by the baseline's."
                    " Intervals are 95% bootstrap intervals over pairs, omitted below six pairs.",
                    "Questions about KVBoost alone (length, share, modes, chunks, memory) are timed"
                    " in one process with both models: KVBoost and plain generate() take turns on"
                    " the same prompts, 4 output tokens each. Repairs are timed there too, against"
                    " our own full prefill. None of these times include storing, which happens"
                    " after the output; the section on memory shows it.",
                )
            ),
        ),
    )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _setting(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return _versions(value)
    return plain(value) if isinstance(value, bool) or value is None else str(value)


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f", {seconds / 60:.0f} minutes"
    return f", {seconds:.0f} seconds" if seconds else ""
