"""Stored chunks that lie in host memory as in vLLM's blocks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from fake_vllm import (
    ARRANGEMENTS,
    AWAY,
    BLOCK_SIZE,
    CHUNK_SIZE,
    HOME,
    changes_of,
    do,
    load_of,
    paged_cache,
    rows_of,
    saved,
    worker_side,
)
from fakes import words
from kvboost.codecs.frame import read
from kvboost.codecs.raw import RawCodec
from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.connectors.vllm.messages import StepWork
from kvboost.connectors.vllm.rows import BlockChunk, BlockRows, HostBlocks
from kvboost.connectors.vllm.worker_side import NICENESS, WorkerSide
from kvboost.core import Entry, PrefixKey, Provenance, Span
from kvboost.reuse.keys import namespace
from kvboost.tiers.base import StoredChunk
from kvboost.tiers.host import FrameChunk, HostFrames

DTYPES = [torch.float32, torch.bfloat16]
TWO_BLOCKS = Span(BLOCK_SIZE, 3 * BLOCK_SIZE)
WHOLE = Span(0, 5 * BLOCK_SIZE)


def filled(arrangement: str, dtype: torch.dtype = torch.float32, codes: str = "auto") -> PagedCache:
    """Blocks of random numbers."""
    cache = paged_cache(arrangement, dtype=dtype, codes=codes)
    torch.manual_seed(0)
    for layer in cache.layers:
        numbers = torch.randn(layer.kv_cache.shape)
        layer.kv_cache.copy_(numbers.to(cache.dtype).view(layer.kv_cache.dtype))
    return cache


def chunk_of(cache: PagedCache, rows: BlockRows, span: Span) -> StoredChunk:
    key = PrefixKey(b"k" * 32)
    tokens = bytes(4 * len(span))
    space = namespace(b"model", "", None)
    entry = Entry(tokens, Provenance.EXACT, key, None, key, span.start, space)
    return HostBlocks(cache, RawCodec(cache.geometry)).from_slots(entry, rows, span, ())


@pytest.mark.parametrize("codes", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrangement", ["joined", "packed"])
def test_whole_blocks_are_kept_and_put_back_as_they_are(
    arrangement: str, dtype: torch.dtype, codes: str
) -> None:
    cache = filled(arrangement, dtype, codes)
    source, target = BlockRows(cache, HOME[:5]), BlockRows(cache, AWAY[:5])
    before = target.read(WHOLE)[0].clone()
    chunk = chunk_of(cache, source, TWO_BLOCKS)
    assert isinstance(chunk, BlockChunk)
    assert chunk.nbytes == len(TWO_BLOCKS) * cache.geometry.bytes_per_token
    expected = source.read(TWO_BLOCKS)[0].clone()
    for layer in cache.layers:  # its own copy
        layer.kv_cache[HOME[1]].zero_()
    target.place(Span(2 * BLOCK_SIZE, 4 * BLOCK_SIZE), chunk, 0)
    after = target.read(WHOLE)[0]
    assert same(after[:, :, 2 * BLOCK_SIZE : 4 * BLOCK_SIZE], expected)
    for rest in (slice(0, 2 * BLOCK_SIZE), slice(4 * BLOCK_SIZE, None)):
        assert same(after[:, :, rest], before[:, :, rest])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrangement", ["joined", "packed"])
def test_its_frame_is_that_of_the_rows(arrangement: str, dtype: torch.dtype) -> None:
    cache = filled(arrangement, dtype)
    rows = BlockRows(cache, HOME[:5])
    chunk = chunk_of(cache, rows, TWO_BLOCKS)
    codec = RawCodec(cache.geometry)
    framed = HostFrames(codec).from_slots(chunk.entry, rows, TWO_BLOCKS, ())
    frame = chunk.frame()
    assert frame == framed.frame()
    assert read(frame).entry == chunk.entry
    assert chunk.frame() is frame, "a second tier writes the same"
    assert torch.equal(chunk.kv()[0], framed.kv()[0])


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("stop", [1, BLOCK_SIZE + 3])
def test_a_part_of_it_is_put_into_any_rows(offset: int, stop: int) -> None:
    cache = filled("packed")
    rows, span = BlockRows(cache, HOME[:5]), Span(2 * BLOCK_SIZE, 2 * BLOCK_SIZE + stop)
    chunk = chunk_of(cache, rows, TWO_BLOCKS)
    rows.place(span, chunk, offset)
    expected = chunk.kv()[0][:, :, offset : offset + stop]
    assert torch.equal(rows.read(span)[0], expected)


@pytest.mark.parametrize("chunk_size", [8, 24, 40, 48])
def test_chunks_of_any_size_are_kept_and_put_back(chunk_size: int) -> None:
    """Of blocks that they fill, of parts of them, and across them."""
    cache = filled("packed")
    source, target = BlockRows(cache, HOME[:5]), BlockRows(cache, AWAY[:5])
    for start in range(0, WHOLE.stop, chunk_size):
        span = Span(start, min(start + chunk_size, WHOLE.stop))
        target.place(span, chunk_of(cache, source, span), 0)
    assert torch.equal(target.read(WHOLE)[0], source.read(WHOLE)[0])


@pytest.mark.parametrize(
    ("arrangement", "span"),
    [("apart", TWO_BLOCKS), ("joined", Span(0, BLOCK_SIZE + 1)), ("joined", Span(3, 3 + 16))],
    ids=["blocks that do not lie together", "a part of a block", "across blocks"],
)
def test_everything_else_is_kept_as_a_frame(arrangement: str, span: Span) -> None:
    assert arrangement in ARRANGEMENTS
    cache = filled(arrangement)
    rows = BlockRows(cache, HOME[:5])
    chunk = chunk_of(cache, rows, span)
    assert isinstance(chunk, FrameChunk)
    assert torch.equal(chunk.kv()[0], rows.read(span)[0])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By their bytes: codes of one byte may be no numbers."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    worker = worker_side()
    yield worker
    worker.close()


def test_a_prompt_is_loaded_from_whole_blocks_and_its_end_from_a_frame(worker: WorkerSide) -> None:
    prompt = words(100)
    rows = saved(worker, prompt)
    kept = worker._store.tiers.memory.get([change.key for change in changes_of(prompt)])
    kinds = [type(chunk) for chunk in kept.values()]
    assert (kinds.count(BlockChunk), kinds.count(FrameChunk)) == (100 // CHUNK_SIZE, 1)
    do(worker, StepWork(loads=[load_of([*prompt, 1, 2, 3], prompt)]))
    assert torch.equal(rows_of(worker, AWAY, Span(0, 100)), rows)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have their own niceness")
def test_saves_give_way(worker: WorkerSide) -> None:
    expected = min(19, os.nice(0) + NICENESS)
    assert worker._saver.submit(os.nice, 0).result() == expected
