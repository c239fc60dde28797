"""A run of the benchmark: workloads times systems, in rounds, into a folder; it can be resumed."""

from __future__ import annotations

import time
from pathlib import Path

from kvboost.bench import records
from kvboost.bench.report.write import write_report
from kvboost.bench.results import results
from kvboost.bench.script import RAW, Script
from kvboost.bench.settings import Settings, check_same
from kvboost.errors import KVBoostError

RESULTS = "results.jsonl"


def run(settings: Settings, folder: Path) -> None:
    """Measure what is not measured yet, judge it, and write results and report."""
    from transformers import AutoTokenizer  # noqa: PLC0415  (slow to load)

    tokenizer = AutoTokenizer.from_pretrained(settings.model)  # before the folder is bound to it
    folder.mkdir(parents=True, exist_ok=True)
    check_same(settings, folder)
    started = time.monotonic()
    script = Script(settings, folder, tokenizer)
    try:
        script.measure()
        script.judge()
        script.ask_questions()
    finally:
        script.note_part(time.monotonic() - started)
    conclude(folder)


def conclude(folder: Path) -> tuple[Path, Path]:
    """Results and report of what a folder has; returns the page and the Markdown."""
    raw = records.read(folder / RAW)
    if not any(line["kind"] == "run" for line in raw):
        raise KVBoostError(f"{folder}: there is no run; `kvboost bench run --out {folder}`")
    records.write(folder / RESULTS, results(raw))
    return write_report(folder)
