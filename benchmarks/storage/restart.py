"""Does a restart cost anything? What a new process reuses of the old one's disk tier, how fast."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.common.material import model, stream, tokenizer
from benchmarks.common.measure import Row, in_process
from kvboost import KVBoost

LONG, SHORT = 2048, 256  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--long", type=int, default=10, help=f"of them with {LONG} tokens")
    parser.add_argument(
        "--drop-caches",
        action="store_true",
        help="empty the system's file cache before the restart (needs root)",
    )


def run(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        names = ("model", "dtype", "prompts", "long")
        task = {"folder": folder, **{name: getattr(options, name) for name in names}}
        before = in_process(Path(__file__), task)
        if options.drop_caches:
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("3")
        after = in_process(Path(__file__), task)
    yield {
        "file_cache": "empty" if options.drop_caches else "full",
        "disk_mb": before["disk_mb"],
        "reused_before": before["second"]["reused"],
        "reused_after": after["first"]["reused"],
        "open_s": after["open_s"],
        "memory_hit_ms": after["second"]["ttft_ms"],
        "disk_hit_ms": after["first"]["ttft_ms"],
        "first_disk_hit_ms": after["first"]["first_ttft_ms"],
        "ratio": after["first"]["ttft_ms"] / after["second"]["ttft_ms"],
        "cold_ms": before["first"]["ttft_ms"],
        "same_answers": before["answers"] == after["answers"],
    }


def _serve(task: argparse.Namespace) -> None:
    """Ask every prompt twice, in a process of its own."""
    words, host = tokenizer(task.model), model(task)
    prompts = [
        stream(words, LONG if number < task.long else SHORT, seed=number)
        for number in range(task.prompts)
    ]
    started = time.perf_counter()
    engine = KVBoost(host, words, disk_cache_dir=task.folder, max_cache_bytes=8 << 30)
    opened = time.perf_counter()
    engine.generate(prompts[0][:64], 2, reuse="off")
    result: Row = {"open_s": opened - started}
    for turn in ("first", "second"):
        answers = [engine.generate(prompt, 2) for prompt in prompts]
        times = [answer.ttft_ms for answer in answers[: task.long]]
        result[turn] = {
            "reused": sum(a.cached_tokens for a in answers) / sum(map(len, prompts)),
            "ttft_ms": median(times),
            "first_ttft_ms": times[0],
        }
    result["answers"] = [answer.token_ids for answer in answers]
    engine.close()
    result["disk_mb"] = sum(path.stat().st_size for path in Path(task.folder).iterdir()) / 2**20
    print(json.dumps(result))


if __name__ == "__main__":
    _serve(argparse.Namespace(**json.loads(sys.argv[1])))
