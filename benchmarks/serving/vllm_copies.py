"""Chunks between host memory and vLLM's blocks on a CPU, in vLLM's Python: GB/s beside a copy."""

from __future__ import annotations

import json
import statistics
import sys
import time
from types import SimpleNamespace

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

from kvboost.connectors.vllm.blocks import PagedCache, StagedRows
from kvboost.core import Span

HEADS, HEAD_DIM, BLOCK = 16, 128, 128
BYTES_PER_TOKEN = 128 << 10


def main() -> None:
    task = json.loads(sys.argv[1])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[task["dtype"]]
    num_layers = BYTES_PER_TOKEN // (2 * HEADS * HEAD_DIM * dtype.itemsize)
    num_chunks = task["tokens"] // BLOCK
    torch.set_num_threads(1)
    with torch.inference_mode():
        layers = {str(n): _layer(dtype, num_chunks + 1) for n in range(num_layers)}
        cache = PagedCache(layers, num_layers, num_chunks + 1, BLOCK, dtype)
        rows = StagedRows(cache, range(1, num_chunks + 1))
        spans = [Span(at * BLOCK, (at + 1) * BLOCK) for at in range(num_chunks)]
        chunk = torch.randn(2 * num_layers, HEADS, BLOCK, HEAD_DIM).to(dtype)
        other = torch.empty_like(chunk)
        ways = {
            "copy": lambda _: other.copy_(chunk),
            "load": lambda span: rows.write(span, [chunk]),
            "save": lambda span: rows.read(span),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(task["rounds"] + 1):
            for way in ways if number % 2 else [*ways][::-1]:
                started = time.perf_counter()
                for span in spans if way == "load" else reversed(spans):
                    ways[way](span)
                taken[way].append(time.perf_counter() - started)
    size_gb = task["tokens"] * BYTES_PER_TOKEN / 1e9
    warm = {way: times[1:] for way, times in taken.items()}  # the first round touches new memory
    row = {f"{way}_gb_s": round(size_gb / statistics.median(warm[way]), 2) for way in warm}
    for way in ("load", "save"):
        shares = [copy / each for copy, each in zip(warm["copy"], warm[way], strict=True)]
        row[f"{way}_share"] = round(statistics.median(shares), 3)
    print(json.dumps(row))


def _layer(dtype: torch.dtype, num_blocks: int) -> SimpleNamespace:
    """As much of an attention layer as its blocks need; they are written by vLLM's own code."""
    backend = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto")
    update = CPUAttentionBackendImpl.do_kv_cache_update
    return SimpleNamespace(
        kv_cache=torch.zeros(num_blocks, HEADS, BLOCK, 2 * HEAD_DIM, dtype=dtype),
        num_kv_heads=HEADS,
        head_size=HEAD_DIM,
        kv_cache_dtype="auto",
        isa=_get_attn_isa(dtype, BLOCK, HEAD_DIM),
        _k_scale_float=1.0,
        _v_scale_float=1.0,
        impl=SimpleNamespace(do_kv_cache_update=lambda *rows: update(backend, *rows)),
    )


if __name__ == "__main__":
    main()
