"""What steps cost on a GPU: kernel launches, waits and copies. Budgets that fail when they grow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batching import Engine, greedy
from device.pretended import Device, pretended, to_device
from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.core import MatchKind, Sampling
from kvboost.weights.awq import AWQLinear
from quantised_checkpoints import quantise_awq

pytestmark = pytest.mark.device

NUM_LAYERS = 8
NUM_ANSWERS = 16
MOVING: dict[str, Any] = {
    "chunk_size": 128,
    "reuse": "auto",
    "promote": False,  # would be counted
    "audit_ratio": 0.0,
}
ENDLESS = {"max_new_tokens": 100_000, "ignore_eos": True}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def with_awq(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The linear layers of all blocks in 4 bits, as a checkpoint has them."""
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            packed = AWQLinear(linear, 32)
            for part, tensor in packed.named_buffers():
                tensor.copy_(quantise_awq(linear.weight.data, 32)[part])
            model.model.set_submodule(name, packed)
    return model


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with pretended(total_bytes=1 << 30) as device:
        yield device


def engine_on(device: Device, **options: Any) -> Engine:
    return Engine(to_device(llama(), device), WordTokenizer(), **options)


@pytest.fixture(scope="module")
def engine(device: Device) -> Iterator[KVBoost]:
    with engine_on(device, max_cache_bytes=1 << 28) as engine:
        yield engine


class Step:
    """What one decode step of a batch costs."""

    def __init__(self, engine: KVBoost, device: Device, prompts: list[list[int]], **rules: Any):
        batch = engine._front._batch
        tickets = [engine.submit(each, Sampling(**ENDLESS, **rules)) for each in prompts]
        while len(batch._running) < len(prompts) or any(m.is_prefilling for m in batch._running):
            time.sleep(0.01)
        name = engine._worker._thread.name
        engine._worker.call(lambda: None)  # between two steps
        with device.counted(thread=name):
            before = engine._worker.call(lambda: counts(batch, device))
            while batch._num_steps < before[0] + 3:
                time.sleep(0.01)
            after = engine._worker.call(lambda: counts(batch, device))
        for ticket in tickets:
            ticket.cancel()
        while batch._running:  # else the next one would count these as its own
            time.sleep(0.01)
        num_steps = after[0] - before[0]
        self.num_launches, self.num_waits, self.joined_bytes = (
            (late - early) / num_steps for early, late in zip(before[1:], after[1:], strict=True)
        )


def counts(batch: Any, device: Device) -> tuple[int, int, int, int]:
    return batch._num_steps, device.num_launches, device.num_waits, device.joined_bytes


def apart() -> list[list[int]]:
    return [words(200 + number, seed=number) for number in range(NUM_ANSWERS)]


def shared() -> list[list[int]]:
    common = words(320, seed=99)
    return [common + words(20 + number, seed=number) for number in range(NUM_ANSWERS)]


def test_sixteen_answers_take_one_kernel_a_layer_and_one_wait_a_step(
    engine: KVBoost, device: Device
) -> None:
    step = Step(engine, device, apart())
    assert step.num_launches / NUM_LAYERS <= 45
    assert step.num_waits <= 1


def test_a_shared_prefix_is_read_by_a_second_kernel_and_nothing_is_joined(
    engine: KVBoost, device: Device
) -> None:
    step = Step(engine, device, shared())
    assert step.num_launches / NUM_LAYERS <= 58
    assert step.num_waits <= 1
    all_bytes = NUM_ANSWERS * 320 * engine._parts.pool.geometry.bytes_per_token
    assert step.joined_bytes < 0.1 * all_bytes  # outputs and rotations, not K/V


def test_sampling_takes_few_launches_and_no_wait_of_its_own(
    engine: KVBoost, device: Device
) -> None:
    plain = Step(engine, device, apart())
    sampled = Step(
        engine, device, apart(), temperature=0.8, top_p=0.9, repetition_penalty=1.1, top_logprobs=3
    )
    assert (
        sampled.num_launches - plain.num_launches <= 2 * 32
    )  # of a model with 32 layers: 2 for each
    assert sampled.num_waits <= 1


def test_weights_in_4_bits_take_ten_launches_a_linear_layer_and_no_wait(
    engine: KVBoost, device: Device
) -> None:
    plain = Step(engine, device, apart())
    model = to_device(with_awq(llama()), device)
    with Engine(model, WordTokenizer(), max_cache_bytes=1 << 28) as packed:
        step = Step(packed, device, apart())
    assert (step.num_launches - plain.num_launches) / (7 * NUM_LAYERS) <= 9  # beside the product
    assert step.num_waits <= 1


def test_a_hit_in_the_pool_copies_ids_and_tables_only(engine: KVBoost, device: Device) -> None:
    prompt = words(2000, seed=7)
    first = engine.submit(prompt, greedy(2)).result()
    engine.flush()
    with device.counted():
        again = engine.submit(prompt, greedy(2)).result()
    assert again.cached_tokens == 1999 and again.token_ids[0] == first.token_ids[0]
    assert sum(copy.num_bytes for copy in device.copies) < 40_000


@pytest.mark.parametrize(("bits", "num_copies", "share"), [(16, 1, 1.0), (8, 2, 0.6), (4, 2, 0.4)])
def test_a_hit_in_host_memory_travels_as_it_is_stored_beside_the_scheduler(
    device: Device, bits: int, num_copies: int, share: float
) -> None:
    prompt, options = words(2048, seed=8), {"chunk_size": 128, "num_blocks": 170}
    with engine_on(device, max_cache_bytes=1 << 28, kv_cache_bits=bits, **options) as engine:
        first = engine.submit(prompt, greedy(2)).result()
        engine.flush()
        for seed in range(3):  # there is no room for both
            engine.submit(words(2000, seed=20 + seed), greedy(2)).result()
        engine.flush()
        scheduler = engine._worker._thread.name
        with device.counted():
            again = engine.submit(prompt, greedy(2)).result()
            engine.flush()
            copies, num_waits = list(device.copies), device.by_wait["a stream"]
        chunk_bytes = 128 * engine._parts.pool.geometry.bytes_per_token
    assert again.cached_tokens >= 1024
    assert bits < 16 or again.token_ids[0] == first.token_ids[0]
    up = [copy for copy in copies if copy.to_device]
    assert not [copy for copy in up if not copy.is_pinned or copy.is_blocking]
    loaded = [copy for copy in up if copy.thread != scheduler]
    num_chunks = again.cached_tokens // 128
    assert len(loaded) == num_copies * num_chunks
    assert 0 < sum(copy.num_bytes for copy in loaded) <= share * num_chunks * chunk_bytes
    num_stored = sum(not copy.to_device and copy.thread != scheduler for copy in copies)
    assert num_waits == num_stored + 1  # for all loaded chunks together


def test_storing_never_makes_the_scheduler_wait(device: Device) -> None:
    with engine_on(device, max_cache_bytes=1 << 28, chunk_size=128) as engine:
        scheduler = engine._worker._thread.name
        with device.counted(thread=scheduler):
            engine.submit(words(2048, seed=31), greedy(1)).result()
            engine.flush()
            num_waits, copies = device.num_waits, list(device.copies)
        host = engine._parts.store.tiers.stats()["host"]
    assert host["num_entries"] == 16
    assert num_waits <= 3 and not [c for c in copies if not c.to_device and c.num_bytes > 4096]


def test_a_chunk_is_copied_to_the_host_once_for_all_tiers(device: Device, tmp_path: Path) -> None:
    options = {"max_cache_bytes": 1 << 28, "chunk_size": 128, "cache_url": f"file://{tmp_path}"}
    with engine_on(device, **options) as engine:
        with device.counted():
            engine.submit(words(2048, seed=32), greedy(1)).result()
            engine.flush()
            sizes = [copy.num_bytes for copy in device.copies if not copy.to_device]
        chunk_bytes = 128 * engine._parts.pool.geometry.bytes_per_token
        tiers = engine._parts.store.tiers.stats()
    assert tiers["host"]["num_entries"] == tiers["disk"]["num_entries"] == 16
    # Twice only if a tier is done with a chunk before the other begins.
    assert 16 <= sizes.count(chunk_bytes) < 24


def test_prompts_are_timed_until_the_device_is_done(engine: KVBoost, device: Device) -> None:
    prompt, scheduler = words(2500, seed=33), engine._worker._thread.name
    with device.counted(thread=scheduler):
        engine.submit(prompt, greedy(1)).result()
        num_steps = device.by_wait["synchronize"]  # of pieces without a token
    with device.counted(thread=scheduler):
        engine.warm(words(1000, seed=34))
        assert device.by_wait["synchronize"] >= 1
    assert num_steps >= 2


def test_moved_text_takes_little_more_launches_than_exact_however_long_it_is(
    device: Device,
) -> None:
    launches = {}
    for length in (600, 2400):
        with engine_on(device, **MOVING) as engine:
            text, name = words(length, seed=4), engine._worker._thread.name
            engine.submit(text, greedy(1)).result()
            engine._worker.call(lambda: None)
            with device.counted(thread=name):
                engine.submit([*text, *words(40, seed=6)], greedy(1)).result()
                num_exact = device.num_launches
            with device.counted(thread=name):
                moved = engine.submit([*words(40, seed=5), *text], greedy(1)).result()
                launches[length] = device.num_launches
            assert moved.reuse.tokens(MatchKind.MOVED) >= 0.8 * length
            assert launches[length] <= 1.3 * num_exact + 5 * NUM_LAYERS
    assert launches[2400] <= 1.15 * launches[600]
