"""Does a model run that does not fit? Layer streaming beside accelerate's offload, within a budget.

Each engine runs in a process of its own, in turns. With --memory-limit a process may have that much
memory in all, file cache included, so that weights come from the disk in every forward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.common.measure import Row, in_process, turns
from benchmarks.weights.random_checkpoint import SHAPES, save_random
from kvboost.bench.clock import seconds

GB = 10**9
ENGINES = {
    "ours": "layer streaming",
    "accelerate": "accelerate's offload to the disk, with the same budget on the CPU",
    "whole": "Transformers with all weights in memory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--budget", type=float, default=3.0, help="GB of weights in memory")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that prompts share")
    parser.add_argument("--memory-limit", type=float, help="GB that a process may have in all")
    parser.add_argument("--engines", default="ours,accelerate", help=", ".join(ENGINES))


def run(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        print(f"writing random weights of {options.shape} ...", file=sys.stderr)
        save_random(options.shape, Path(folder))
        yield from _measure(Path(folder), options)


def _measure(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    files = sorted(folder.glob("*.safetensors"))
    total_gb = sum(path.stat().st_size for path in files) / GB
    engines = options.engines.split(",")
    runs: dict[str, list[Row]] = {engine: [] for engine in engines}
    memory, disk = [], []
    for turn, engine in turns(engines, options.rounds):
        if turn == 0 or options.memory_limit:  # a group pays for what it reads first
            _forget(files)
        memory.append(_memcpy_gb_s())
        disk.append(_disk_gb_s(files[0]))
        runs[engine].append(_in_process(engine, folder, options))
        print(f"{engine}: {json.dumps(runs[engine][-1])}", file=sys.stderr)
    first_s = median(each["seconds_per_token"] for each in runs[engines[0]])
    for engine, done in runs.items():
        token_s = median(each["seconds_per_token"] for each in done)
        yield {
            "engine": engine,
            "checkpoint_gb": round(total_gb, 2),
            "budget_gb": options.budget,
            "memory_limit_gb": options.memory_limit,
            "seconds_per_token": round(token_s, 3),
            "tokens_per_s": round(1 / token_s, 3),
            "weights_gb_s": round(done[0]["forward_gb"] / token_s, 2),
            "streamed_gb_s": round(done[0]["streamed_gb"] / token_s, 2),
            "memcpy_gb_s": round(median(memory), 2),
            "disk_gb_s": round(median(disk), 2),
            "peak_weights_gb": round(max(each["peak_file_gb"] for each in done), 3),
            "peak_other_gb": round(max(each["peak_anonymous_gb"] for each in done), 3),
            "cold_ttft_s": _middle(done, "cold_ttft_s"),
            "warm_ttft_s": _middle(done, "warm_ttft_s"),
            "same_tokens": done[0]["tokens"] == runs[engines[0]][0]["tokens"],
            "times_as_fast": round(token_s / first_s, 2),  # the first engine
        }


def _middle(done: list[Row], name: str) -> float | None:
    values = [each[name] for each in done if each[name] is not None]
    return round(median(values), 3) if values else None


def _in_process(engine: str, folder: Path, options: argparse.Namespace) -> Row:
    task = {
        "engine": engine,
        "folder": str(folder),
        "budget_bytes": int(options.budget * GB),
        "new_tokens": options.new_tokens,
        "prefix": options.prefix,
    }
    limit = options.memory_limit and partial(_limit_memory, int(options.memory_limit * GB))
    return in_process(Path(__file__).with_name("streaming_worker.py"), task, limit)


def _limit_memory(size_bytes: int) -> None:
    """Put this process into a control group of its own (needs root)."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "memory").is_dir()
    group = (root / "memory" if is_first else root) / f"kvboost-{os.getpid()}"
    group.mkdir()
    name = "memory.limit_in_bytes" if is_first else "memory.max"
    (group / name).write_text(str(size_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _forget(files: list[Path]) -> None:
    """Let the system's cache forget files, so that they are in it as a reader left them."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _memcpy_gb_s() -> float:
    """What a copy in memory moves, by all threads; the best of a few."""
    source = torch.ones(GB // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return len(source) / GB / min(seconds(lambda: target.copy_(source)) for _ in range(5))


def _disk_gb_s(file: Path) -> float:
    """What `dd` reads of a file past the file cache."""
    command = ["dd", f"if={file}", "of=/dev/null", "bs=8M", "iflag=direct"]
    taken_s = seconds(lambda: subprocess.run(command, check=True, stderr=subprocess.DEVNULL))
    return file.stat().st_size / GB / taken_s
