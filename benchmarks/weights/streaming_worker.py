"""One engine on one checkpoint, in a process of its own: tokens per second and memory."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.common.measure import Peak, memory_mb
from kvboost import KVBoost
from kvboost.bench.questions.subjects import TokenClock
from kvboost.models.load import load
from kvboost.weights.stream import streamed

GB = 10**9


def main() -> None:
    task = json.loads(sys.argv[1])
    logging.disable_progress_bar()
    torch.zeros(8, 8) @ torch.zeros(8, 8)
    of_files, other = (Peak(partial(memory_mb, kind), 0.002) for kind in ("RssFile", "RssAnon"))
    files_mb, other_mb = of_files.most, other.most
    started = time.perf_counter()
    with of_files, other, tempfile.TemporaryDirectory() as scratch:
        if task["engine"] == "ours":
            model, tokenizer = load(task["folder"], "cpu", {}, task["budget_bytes"])
        else:
            model, tokenizer = load_other(task, scratch)
        loaded_s = time.perf_counter() - started
        tokens, seconds = decode(model, task["new_tokens"])
        streamed_gb = streamed_per_forward(model)
        cold_s = warm_s = None
        if task["engine"] in ("ours", "whole") and task["prefix"]:
            cold_s, warm_s = first_tokens(model, tokenizer, task["prefix"])
    table = model.get_input_embeddings().weight
    names = {id(each): each.nbytes for each in model.parameters()}
    print(
        json.dumps(
            {
                "load_s": round(loaded_s, 2),
                "seconds_per_token": seconds,
                "tokens": tokens,
                "forward_gb": (sum(names.values()) - table.nbytes) / GB,
                "streamed_gb": streamed_gb,
                "peak_file_gb": (of_files.most - files_mb) * 2**20 / GB,
                "peak_anonymous_gb": (other.most - other_mb) * 2**20 / GB,
                "cold_ttft_s": cold_s,
                "warm_ttft_s": warm_s,
            }
        )
    )


def load_other(task: dict[str, Any], scratch: str) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {}
    if task["engine"] == "accelerate":
        memory = {"cpu": task["budget_bytes"]}
        arguments = {"device_map": "auto", "max_memory": memory, "offload_folder": scratch}
    model = AutoModelForCausalLM.from_pretrained(task["folder"], **arguments)
    return model, AutoTokenizer.from_pretrained(task["folder"])


def decode(model: Any, num_new: int) -> tuple[list[int], float]:
    """Greedy tokens, and the median time of one; the first forwards are not counted."""
    ids = torch.arange(5, 21)[None]
    clock = TokenClock()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new + 1,
        min_new_tokens=num_new + 1,
        do_sample=False,
        stopping_criteria=[clock],
    )
    return output[0, ids.shape[1] :].tolist(), median(b - a for a, b in pairwise(clock.times))


def streamed_per_forward(model: Any) -> float:
    """GB that one more forward brings in."""
    weights = streamed(model)
    if weights is None:
        return 0.0
    before = weights.stats.streamed_bytes
    with torch.no_grad():
        model(torch.tensor([[7]]))
    return (weights.stats.streamed_bytes - before) / GB


def first_tokens(model: Any, tokenizer: Any, num_prefix: int) -> tuple[float, float]:
    """Time to the first token of a prompt whose beginning is new, and of one where it is known."""
    words = random.Random(1)
    prefix = [words.randrange(5, 250) for _ in range(num_prefix)]
    with KVBoost(model, tokenizer) as engine:
        engine.generate(list(range(5, 40)), 1)
        cold, warm = (
            engine.generate([*prefix, *range(10 + 20 * turn, 26 + 20 * turn)], 1) for turn in (0, 1)
        )
    assert warm.cached_tokens == num_prefix
    return cold.ttft_ms / 1e3, warm.ttft_ms / 1e3


if __name__ == "__main__":
    main()
