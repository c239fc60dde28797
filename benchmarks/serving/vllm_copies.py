"""Chunks between host memory and vLLM's blocks on a CPU, in vLLM's Python: GB/s beside a copy."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

from kvboost.codecs.raw import RawCodec
from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.connectors.vllm.rows import BlockRows, HostBlocks
from kvboost.core import Entry, PrefixKey, Provenance, Span
from kvboost.reuse.keys import namespace
from kvboost.tiers.base import Medium, StoredChunk
from kvboost.tiers.host import HostFrames

HEADS, HEAD_DIM, BLOCK = 16, 128, 128
BYTES_PER_TOKEN = 128 << 10
SPACE = namespace(b"copies", "", None)


def main() -> None:
    task = json.loads(sys.argv[1])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[task["dtype"]]
    num_layers = BYTES_PER_TOKEN // (2 * HEADS * HEAD_DIM * dtype.itemsize)
    num_chunks = task["tokens"] // BLOCK
    torch.set_num_threads(1)
    with torch.inference_mode():
        layers = {str(n): _layer(dtype, num_chunks + 1) for n in range(num_layers)}
        cache = PagedCache(layers, num_layers, num_chunks + 1, BLOCK, dtype)
        rows = BlockRows(cache, range(1, num_chunks + 1))
        spans = [Span(at * BLOCK, (at + 1) * BLOCK) for at in range(num_chunks)]
        codec = RawCodec(cache.geometry)
        media = {"": HostBlocks(cache, codec), "frames_": HostFrames(codec)}
        kept: dict[str, dict[Span, StoredChunk]] = {name: {} for name in media}
        taken: dict[str, list[float]] = {}
        for number in range(task["rounds"] + 1):
            for name in media if number % 2 else [*media][::-1]:
                way = name if number else f"first_{name}"  # memory fills
                _measure(taken, way, media[name], rows, spans, kept[name])
    size_gb = task["tokens"] * BYTES_PER_TOKEN / 1e9
    row = {way: round(size_gb / statistics.median(times), 2) for way, times in taken.items()}
    shares = {
        f"{way}_share": round(statistics.median(np.divide(taken["copy"], times)), 3)
        for way, times in taken.items()
        if way != "copy" and "first" not in way
    }
    print(json.dumps({f"{way}_gb_s": speed for way, speed in row.items()} | shares))


def _measure(
    taken: dict[str, list[float]],
    name: str,
    medium: Medium,
    rows: BlockRows,
    spans: list[Span],
    kept: dict[Span, StoredChunk],
) -> None:
    """Save a prompt in place of the last one, copy what was saved, and load it."""

    def timed(way: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        taken.setdefault(way, []).append(time.perf_counter() - started)

    def save() -> None:
        for span in spans:
            kept[span] = _chunk(medium, rows, span)

    timed(f"{name}save", save)
    if not name:
        sources = [torch.zeros(chunk.nbytes, dtype=torch.uint8) for chunk in kept.values()]
        copies = [torch.zeros_like(source) for source in sources]
        timed(
            "copy", lambda: [copy.copy_(each) for copy, each in zip(copies, sources, strict=True)]
        )
    timed(f"{name}load", lambda: [rows.place(*each, 0) for each in kept.items()])


def _chunk(medium: Medium, rows: BlockRows, span: Span) -> StoredChunk:
    tokens = bytes(4 * len(span))
    key = PrefixKey(span.start.to_bytes(32, "little"))
    entry = Entry(tokens, Provenance.EXACT, key, None, key, span.start, SPACE)
    return medium.from_slots(entry, rows, span, ())


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
