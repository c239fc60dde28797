"""K/V between host memory and vLLM's blocks on a GPU: copies and launches of 8K tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from device.pretended import Device, DeviceTensor, pretended
from fake_vllm import FakeLayer
from kvboost.connectors.vllm import rows as rows_module
from kvboost.connectors.vllm.blocks import PagedCache
from kvboost.connectors.vllm.rows import BlockRows, StagedRows
from kvboost.core import Span

pytestmark = pytest.mark.device

NUM_LAYERS, NUM_TOKENS, CHUNK, BLOCK = 32, 8192, 128, 16
HEADS, HEAD_DIM = 2, 8
NUM_BLOCKS = NUM_TOKENS // BLOCK + 4
SPANS = [Span(start, start + CHUNK) for start in range(0, NUM_TOKENS, CHUNK)]


def put(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Into [2, blocks, size, heads, dim], as vLLM's kernel does in one launch; these are two."""
    for kind, rows in enumerate((key, value)):
        cache[kind].view(-1, HEADS, HEAD_DIM).index_copy_(0, slots, rows)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    bytes_per_token = 2 * NUM_LAYERS * HEADS * HEAD_DIM * 2
    # As of K/V with 128 KB a token: an eighth of this prompt.
    monkeypatch.setattr(rows_module, "STAGED_BYTES", NUM_TOKENS // 8 * bytes_per_token)
    with pretended(total_bytes=1 << 28) as device:
        yield device


def cache_on(device: Device) -> PagedCache:
    shape = (2, NUM_BLOCKS, BLOCK, HEADS, HEAD_DIM)
    layers = {
        f"layers.{number}.attn": FakeLayer(
            DeviceTensor(torch.zeros(shape, dtype=torch.bfloat16), device), put, HEADS, HEAD_DIM
        )
        for number in range(NUM_LAYERS)
    }
    return PagedCache(layers, NUM_LAYERS, NUM_BLOCKS, BLOCK, torch.bfloat16)


def test_a_prompt_of_8k_tokens_is_loaded_and_saved_in_few_copies_and_launches(
    device: Device,
) -> None:
    cache = cache_on(device)
    block_ids = list(range(NUM_BLOCKS - 1, 3, -1))
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(2 * NUM_LAYERS, HEADS, NUM_TOKENS, HEAD_DIM, generator=generator)
    planes = planes.to(torch.bfloat16)
    rows = StagedRows(cache, block_ids)
    with device.counted():
        for span in SPANS:
            rows.write(span, [planes[:, :, span.start : span.stop].clone()])
        rows.flush()
        num_puts = device.by_kernel["index_copy_"] // 2  # vLLM's kernel is one launch
        loading = device.num_launches - num_puts, len(device.copies)
    rows = StagedRows(cache, block_ids)
    with device.counted():
        found = {span: rows.read(span)[0] for span in reversed(SPANS)}  # as chunks are stored
        saving = device.num_launches, len(device.copies)
    assert torch.equal(torch.cat([found[span] for span in SPANS], dim=2), planes)
    assert 64 <= loading[0] <= 400 and 64 <= loading[1] <= 70, loading
    assert 64 <= saving[0] <= 400 and 64 <= saving[1] <= 70, saving


def test_rows_in_stages_are_those_without(device: Device) -> None:
    cache = cache_on(device)
    block_ids = [5, 9, 2, 40, 41]
    generator = torch.Generator().manual_seed(1)
    planes = torch.randn(2 * NUM_LAYERS, HEADS, 75, HEAD_DIM, generator=generator)
    planes = planes.to(torch.bfloat16)
    staged = StagedRows(cache, block_ids)
    for span in (Span(0, 30), Span(30, 75)):
        staged.write(span, [planes[:, :, span.start : span.stop + 3]])  # more than the span wants
    staged.flush()
    plain = BlockRows(cache, block_ids)
    assert torch.equal(plain.read(Span(0, 75))[0], planes)
    assert torch.equal(StagedRows(cache, block_ids).read(Span(11, 60))[0], planes[:, :, 11:60])
