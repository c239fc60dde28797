"""Blocks that are arranged in any way are learned, read and written as rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_vllm import (
    ARRANGEMENTS,
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    FakeLayer,
    PutRows,
    paged_cache,
    put_apart,
    put_joined,
)
from kvboost.connectors.vllm.blocks import CODES, Layout, PagedCache, learn_layout
from kvboost.connectors.vllm.rows import BlockRows
from kvboost.core import Span
from kvboost.errors import UnsupportedModel

DTYPES = [torch.float32, torch.bfloat16]


def empty(shape: Callable[[int, int], tuple[int, ...]], num_blocks: int, size: int,
          dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    return torch.zeros(shape(num_blocks, size), dtype=dtype)


def random_rows(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """K and V [2, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)


def learned(cache: torch.Tensor, num_blocks: int, size: int, put: PutRows) -> Layout:
    return learn_layout(cache, cache.dtype, num_blocks, size, HEADS, HEAD_DIM, put)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_rows_are_read_as_they_were_written(
    arrangement: str, size: int, dtype: torch.dtype
) -> None:
    shape, put = ARRANGEMENTS[arrangement]
    cache = empty(shape, 5, size, dtype)
    layout = learned(cache, 5, size, put)
    rows = random_rows(2 * size, dtype)
    slots = torch.cat([torch.arange(3 * size, 4 * size), torch.arange(size, 2 * size)])
    put(rows[0], rows[1], cache, slots)
    assert torch.equal(layout.read([cache], torch.tensor([3, 1])), rows.transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_single_tokens_are_picked_from_any_blocks(arrangement: str, dtype: torch.dtype) -> None:
    shape, put = ARRANGEMENTS[arrangement]
    cache = empty(shape, 4, 32, dtype)
    layout = learned(cache, 4, 32, put)
    rows = random_rows(4 * 32, dtype)
    put(rows[0], rows[1], cache, torch.arange(4 * 32))
    slots = torch.tensor([127, 0, 33, 40, 17])
    picked = layout.pick(cache, slots // 32, slots % 32)
    assert torch.equal(picked, rows[:, slots].transpose(1, 2))


def test_learning_leaves_the_blocks_alone() -> None:
    shape, put = ARRANGEMENTS["apart"]
    cache = empty(shape, 4, BLOCK_SIZE, torch.float32) + 7
    learned(cache, 4, BLOCK_SIZE, put)
    assert torch.equal(cache, torch.full_like(cache, 7))


def put_rounded(*rows: torch.Tensor) -> None:
    put_joined(rows[0] // 2 * 2, *rows[1:])


def put_keys_twice(*rows: torch.Tensor) -> None:
    put_joined(rows[0], rows[0], *rows[2:])


def put_nothing(*rows: torch.Tensor) -> None:
    pass


def put_shuffled(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    order = torch.randperm(HEAD_DIM, generator=torch.Generator().manual_seed(0))
    put_joined(key[..., order], value, cache, slots)


def put_in_turns(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Every other token has its dimensions in reverse."""
    odd = (slots % 2 == 1)[:, None, None]
    put_joined(torch.where(odd, key.flip(-1), key), value, cache, slots)


@pytest.mark.parametrize("put", [put_shuffled, put_in_turns])
def test_blocks_in_no_regular_order_are_refused(put: PutRows) -> None:
    cache = empty(ARRANGEMENTS["joined"][0], 4, BLOCK_SIZE, torch.float32)
    with pytest.raises(UnsupportedModel, match="no regular order"):
        learned(cache, 4, BLOCK_SIZE, put)


@pytest.mark.parametrize("put", [put_rounded, put_keys_twice, put_nothing])
def test_blocks_that_lose_numbers_are_refused(put: PutRows) -> None:
    cache = empty(ARRANGEMENTS["joined"][0], 4, BLOCK_SIZE, torch.float32)
    with pytest.raises(UnsupportedModel, match="as written"):
        learned(cache, 4, BLOCK_SIZE, put)


def test_blocks_with_room_for_something_else_are_refused() -> None:
    def put(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> None:
        put_joined(key, value, cache[..., : 2 * HEAD_DIM], at)

    cache = torch.zeros(4, HEADS, BLOCK_SIZE, 2 * HEAD_DIM + 1)
    with pytest.raises(UnsupportedModel, match="as written"):
        learned(cache, 4, BLOCK_SIZE, put)


def test_a_tensor_that_does_not_count_blocks_is_refused() -> None:
    cache = empty(ARRANGEMENTS["joined"][0], 4, BLOCK_SIZE, torch.float32)
    with pytest.raises(UnsupportedModel, match="tensor of shape"):
        learned(cache, 5, BLOCK_SIZE, put_joined)


SPANS = st.tuples(st.integers(0, 79), st.integers(1, 80)).map(
    lambda pair: Span(pair[0], min(80, pair[0] + pair[1]))
)


def planes(cache: PagedCache, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    (group,) = cache.geometry.groups
    shape = (len(group.planes), group.heads, num_tokens, group.head_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, cache.geometry.dtype))


@pytest.mark.parametrize("codes", ["auto", "fp8"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_whole_blocks_get_the_numbers_that_the_operation_writes(
    arrangement: str, codes: str
) -> None:
    cache = paged_cache(arrangement, codes=codes)
    expected = planes(cache, BLOCK_SIZE, 0)
    slots = cache.slots([3], torch.arange(BLOCK_SIZE))
    for layer in range(2):
        rows = expected[2 * layer : 2 * layer + 2].transpose(1, 2)
        cache.put(layer, rows, slots)
    by_operation = [layer.kv_cache.clone() for layer in cache.layers]
    for layer in cache.layers:
        layer.kv_cache.zero_()
    BlockRows(cache, [3]).write(Span(0, BLOCK_SIZE), [expected])
    assert cache.fills_blocks == (arrangement != "apart")
    for layer, wanted in zip(cache.layers, by_operation, strict=True):
        # As numbers: an operation may write zero without a sign.
        got = layer.kv_cache.view(cache.dtype).float()
        assert torch.equal(got, wanted.view(cache.dtype).float())


@given(st.sampled_from(sorted(ARRANGEMENTS)), st.sampled_from(DTYPES), SPANS, SPANS,
       st.permutations(range(24)))  # fmt: skip
def test_any_span_of_a_request_is_read_as_it_was_written(
    arrangement: str, dtype: torch.dtype, written: Span, read: Span, block_ids: list[int]
) -> None:
    cache = paged_cache(arrangement, dtype=dtype)
    rows, others = BlockRows(cache, block_ids[:5]), BlockRows(cache, block_ids[5:10])
    whole = Span(0, 80)
    expected, of_others = planes(cache, 80, 1), planes(cache, 80, 2)
    rows.write(whole, [expected])
    others.write(whole, [of_others])
    new = planes(cache, len(written) + 3, 3)  # more than the span wants
    rows.write(written, [new])
    expected[:, :, written.start : written.stop] = new[:, :, : len(written)]
    assert torch.equal(rows.read(read)[0], expected[:, :, read.start : read.stop])
    assert torch.equal(others.read(whole)[0], of_others)


def test_the_geometry_is_that_of_the_layers() -> None:
    geometry = paged_cache(num_layers=3, dtype=torch.bfloat16).geometry
    (group,) = geometry.groups
    assert (geometry.num_layers, geometry.dtype, geometry.itemsize) == (3, "bfloat16", 2)
    assert (group.planes, group.heads, group.head_dim) == ((0, 1, 2, 3, 4, 5), HEADS, HEAD_DIM)


def test_single_tokens_of_a_layer_are_picked_by_slot() -> None:
    cache = paged_cache("packed")
    expected = planes(cache, 40, 0)
    BlockRows(cache, [9, 4, 2]).write(Span(0, 40), [expected])
    places = torch.tensor([0, 17, 39])
    slots = cache.slots([9, 4, 2], places)
    assert slots.tolist() == [9 * 16, 4 * 16 + 1, 2 * 16 + 7]
    assert torch.equal(cache.pick(1, slots), expected[2:, :, places])


def layer_of(*shape: int, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> FakeLayer:
    return FakeLayer(torch.zeros(shape, dtype=dtype), put_apart, heads)


SHAPE = (2, 6, BLOCK_SIZE, HEADS, HEAD_DIM)


@pytest.mark.parametrize(
    "other",
    [
        layer_of(2, 6, BLOCK_SIZE, 1, HEAD_DIM, heads=1),
        layer_of(2, 6, 2 * BLOCK_SIZE, HEADS, HEAD_DIM),
        layer_of(*SHAPE, dtype=torch.bfloat16),
    ],
    ids=["heads", "tensor", "dtype"],
)
def test_layers_of_different_shapes_are_refused(other: FakeLayer) -> None:
    with pytest.raises(UnsupportedModel, match="different shapes"):
        PagedCache({"one": layer_of(*SHAPE), "two": other}, 2, 6, BLOCK_SIZE, torch.float32)


def test_a_model_in_which_some_layers_keep_nothing_is_refused() -> None:
    layers = {"one": layer_of(*SHAPE), "two": layer_of(*SHAPE)}
    with pytest.raises(UnsupportedModel, match="or none"):
        PagedCache(layers, 3, 6, BLOCK_SIZE, torch.float32)


@pytest.mark.parametrize("codes", sorted(CODES))
@pytest.mark.parametrize("computed", DTYPES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_code_of_one_byte_is_read_as_it_was_written(
    arrangement: str, computed: torch.dtype, codes: str
) -> None:
    cache = paged_cache(arrangement, dtype=computed, codes=codes)
    assert cache.is_quantised
    assert cache.geometry.itemsize == 1
    every = torch.arange(256, dtype=torch.uint8).view(cache.dtype)
    every = every[every.float().isfinite()]
    (group,) = cache.geometry.groups
    shape = (len(group.planes), group.heads, 80, group.head_dim)
    picked = torch.randint(len(every), shape, generator=torch.Generator().manual_seed(0))
    rows, whole = BlockRows(cache, [7, 3, 11, 2, 5]), Span(0, 80)
    rows.write(whole, [every[picked]])
    read = rows.read(whole)[0]
    assert read.dtype == cache.dtype
    assert torch.equal(read.view(torch.uint8), every[picked].view(torch.uint8))


def test_a_format_with_codes_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="int8_per_token_head"):
        paged_cache(codes="int8_per_token_head")
