"""All kinds of models, codecs and requests on a pretended GPU answer as on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from batching import Engine, greedy
from device.pretended import Device, pretended, to_device
from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.build import DEVICE_SHARE, build_pool
from kvboost.config import Options
from kvboost.core import KVGeometry, MatchKind, PlaneGroup, Sampling
from kvboost.engine.batch.ticket import Ticket
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models import kernels, pool
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.device

PROMPTS = [words(150 + 7 * number, seed=number % 2) for number in range(4)]
KINDS = {
    "deepseek_v3-mla", "gemma3-two-rotations", "gpt_oss-sinks", "llama", "mistral-sliding",
    "phi-partial",
}  # fmt: skip
NUM_FAULTS = int(os.environ.get("KVBOOST_TEST_OUT_OF_MEMORY", "6"))


def answers(engine: KVBoost, num_new: int = 4) -> list[tuple[int, ...]]:
    """Those of a cold batch, then of a warm one."""
    found = []
    for _ in range(2):
        tickets = [engine.submit(prompt, greedy(num_new)) for prompt in PROMPTS]
        found += [ticket.result().token_ids for ticket in tickets]
        engine.flush()
    return found


def on_cpu(name: str, **options: Any) -> list[tuple[int, ...]]:
    with Engine(build(*SUPPORTED[name]), WordTokenizer(), chunk_size=32, **options) as engine:
        return answers(engine)


def on_device(name: str, device: Device, **options: Any) -> list[tuple[int, ...]]:
    model = to_device(build(*SUPPORTED[name]), device)
    with Engine(model, WordTokenizer(), chunk_size=32, **options) as engine:
        return answers(engine)


def types(in_gate: set[str]) -> list[Any]:
    """All types of models; others than these in the long tests."""
    return [
        pytest.param(name, marks=() if name in in_gate else pytest.mark.long)
        for name in sorted(SUPPORTED)
    ]


@pytest.mark.parametrize("name", types(KINDS))
def test_every_type_of_model_answers_as_on_a_cpu(name: str) -> None:
    with pretended(total_bytes=1 << 28) as device:
        assert on_device(name, device) == on_cpu(name)


def on_two_devices(model: Any, device: Device) -> Any:
    """The last layer on the second device, with the hooks of `device_map`."""
    second = f"model.layers.{model.config.num_hidden_layers - 1}", "model.norm"
    to_device(model, device, lambda module: int(module.startswith(second)))
    for block in ("", *second, "lm_head"):
        place = torch.device("cuda", int(block in second))
        skipped = model._skip_keys_device_placement
        hook = AlignDevicesHook(place, io_same_device=not block, skip_keys=skipped)
        add_hook_to_module(model.get_submodule(block), hook)
    return model


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama", on_two_devices),
        ("mistral-sliding", on_two_devices),
        ("gemma3-two-rotations", to_device),
        ("mixtral", to_device),
    ],
)
def test_sequences_in_one_kernel_have_the_logits_that_they_have_alone(
    name: str, place: Callable[..., Any]
) -> None:
    with pretended(total_bytes=1 << 28) as device:
        model = place(build(*SUPPORTED[name]).to(torch.float16), device)
        with Engine(model, WordTokenizer(), chunk_size=32) as engine:
            hosted = engine._parts.model  # certified by runs of several sequences
            assert hosted.joins and hosted.packs
            with device.counted():
                assert len(set(answers(engine))) > 1
    assert device.by_kernel["flash of several"] > 0
    assert not device.by_kernel["sdpa math"]


def again_from_below(model: Any, **options: Any) -> tuple[tuple[int, ...], int]:
    """Output and hits of the host tier for a prompt whose blocks others have taken since."""
    options |= {"chunk_size": 32, "num_blocks": 40}
    with Engine(model, WordTokenizer(), **options) as engine:
        engine.submit(PROMPTS[0], greedy(1)).result()
        engine.flush()
        for seed in range(4):
            engine.submit(words(300, seed=50 + seed), greedy(1)).result()
        again = engine.submit(PROMPTS[0], greedy(1)).result()
        assert again.cached_tokens >= 128
        below = engine._parts.store.tiers.stats()
        return again.token_ids, below["host"]["hits"] if "host" in below else 0


@pytest.mark.parametrize("name", types({"llama"}))
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_chunks_lie_in_host_memory(name: str, bits: int) -> None:
    on_cpu, _ = again_from_below(build(*SUPPORTED[name]), kv_cache_bits=bits)
    with pretended(total_bytes=1 << 28) as device:
        model = to_device(build(*SUPPORTED[name]), device)
        on_device, num_hits = again_from_below(model, kv_cache_bits=bits)
    assert num_hits and on_device == on_cpu


def test_quantised_chunks_of_two_devices_lie_in_host_memory() -> None:
    on_cpu, _ = again_from_below(build(*SUPPORTED["llama"]), kv_cache_bits=8)
    with pretended(total_bytes=1 << 28) as device:
        model = on_two_devices(build(*SUPPORTED["llama"]), device)
        on_device, num_hits = again_from_below(model, kv_cache_bits=8)
    assert num_hits and on_device == on_cpu


def test_a_deleted_tenant_is_gone_from_host_memory() -> None:
    with pretended(total_bytes=1 << 28) as device:
        model = to_device(build(*SUPPORTED["llama"]), device)
        with Engine(model, WordTokenizer(), chunk_size=32) as engine:
            for tenant in ("a", "b"):
                engine.submit(PROMPTS[0], greedy(1), tenant=tenant).result()
            engine.flush()
            tiers = engine._parts.store.tiers
            before = tiers.stats()["host"]["num_entries"]
            assert not engine.contents.delete(None, tenant="a").pending
            assert tiers.stats()["host"]["num_entries"] == before // 2 > 0
            assert engine.submit(PROMPTS[0], greedy(1), tenant="a").result().cached_tokens == 0
            assert engine.submit(PROMPTS[0], greedy(1), tenant="b").result().cached_tokens > 100


@pytest.mark.parametrize("name", types({"llama"}))
def test_a_device_without_float64_is_enough(name: str) -> None:
    with pretended(total_bytes=1 << 28, has_float64=False) as device:
        assert on_device(name, device) == on_cpu(name)


def test_without_a_compiler_flash_attention_stays_and_repair_has_masks() -> None:
    kernels.flex_refusals.clear()
    try:
        with pretended(total_bytes=1 << 28, has_compiler=False) as device:
            model = to_device(build(*SUPPORTED["llama"]).to(torch.bfloat16), device)
            with Engine(model, WordTokenizer(), chunk_size=32, reuse="auto") as engine:
                assert model.config._attn_implementation == "kvboost_sdpa"
                assert "triton" in kernels.flex_refusals[model.device]
                engine._parts.cost.pays = lambda *_: True
                text = words(400, seed=3)
                engine.submit(text, greedy(1)).result()
                moved = engine.submit([*words(50, seed=4), *text], greedy(1)).result()
                assert moved.reuse.tokens(MatchKind.MOVED) > 300
    finally:
        kernels.flex_refusals.clear()


@pytest.mark.parametrize("name", ["llama", "gemma3-two-rotations"])
def test_moved_text_is_what_it_is_on_a_cpu(name: str) -> None:
    text, found = words(400, seed=3), []
    for place in (lambda model, _: model, to_device, on_two_devices):
        with pretended(total_bytes=1 << 28) as device:
            model = place(build(*SUPPORTED[name]), device)
            options = {"chunk_size": 32, "reuse": "auto", "quality_budget": 100.0}
            with Engine(model, WordTokenizer(), **options) as engine:
                engine._parts.cost.pays = lambda *_: True
                engine.submit(text, greedy(1)).result()
                result = engine.submit([*words(50, seed=4), *text], greedy(6)).result()
                found.append((result.token_ids, result.reuse.tokens(MatchKind.MOVED)))
    assert found[0] == found[1] == found[2] and found[0][1] > 300


def test_draws_and_scores_are_those_of_a_cpu() -> None:
    rules = Sampling(
        max_new_tokens=6, ignore_eos=True, temperature=0.9, top_p=0.8, seed=3, top_logprobs=2,
        repetition_penalty=1.2, presence_penalty=0.3, logit_bias={7: 1.5},
    )  # fmt: skip
    found = []
    for there in (True, False):
        with pretended(total_bytes=1 << 28) as device:
            model = build(*SUPPORTED["llama"])
            with Engine(to_device(model, device) if there else model, WordTokenizer()) as engine:
                found.append(engine.submit(PROMPTS[0], rules).result().token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama", "gemma3-two-rotations"])
def test_a_model_on_two_devices_answers_as_on_one(name: str) -> None:
    with pretended(total_bytes=1 << 28) as device:
        model = on_two_devices(build(*SUPPORTED[name]), device)
        with Engine(model, WordTokenizer(), chunk_size=32) as engine:
            assert answers(engine) == on_cpu(name)
            assert {str(each) for each in engine._parts.pool.devices} == {"cuda:0", "cuda:1"}
            assert engine._parts.model.packs
            last = engine._parts.pool.layers[model.config.num_hidden_layers - 1]
            assert {str(plane.device) for plane in last} == {"cuda:1"}


def test_the_pool_of_a_large_model_fits_on_each_of_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {number: (38 - 4 * number) << 30 for number in range(4)}  # after 35 GB of weights each
    groups = [PlaneGroup(tuple(range(40 * n, 40 * n + 40)), 8, 128, n) for n in range(4)]
    geometry = KVGeometry(80, tuple(groups), "bfloat16", 2)  # Llama 70B, 320 KB a token
    model: Any = SimpleNamespace(geometry=geometry, refusal="")
    model.model = SimpleNamespace(device=torch.device("cuda", 0))
    on_meta = partial(torch.empty, device="meta")
    monkeypatch.setattr(pool, "_zeros", lambda shape, dtype, _: on_meta(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 80 << 30))
    made = build_pool(Options(), model)
    assert made.num_tokens >= 128 * 1024
    for number, buffer in enumerate(made.buffers):
        assert made.devices[number] == torch.device("cuda", number)
        assert buffer.nbytes <= DEVICE_SHARE * free[number]


def test_the_engines_thread_is_on_the_device_of_its_model() -> None:
    with pretended(total_bytes=1 << 28) as device:
        model = to_device(build(*SUPPORTED["llama"]), device, lambda name: 1)
        with Engine(model, WordTokenizer()) as engine:
            assert engine._worker.call(torch.cuda.current_device) == 1


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("tf32")
def test_a_model_in_single_precision_may_have_its_products_rounded() -> None:
    with pretended(total_bytes=1 << 28, has_tf32=True) as device:
        model = to_device(build(*SUPPORTED["llama"]), device)
        with Engine(model, WordTokenizer(), chunk_size=32) as engine:
            assert engine._parts.model.packs
            assert len(answers(engine)) == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    ("place", "reason"),
    [("cpu", "on cpu and cuda:0: load it on GPUs only"), ("meta", "are offloaded")],
)
def test_a_model_with_weights_elsewhere_is_refused_with_the_reason(place: str, reason: str) -> None:
    with pretended() as device:
        model = to_device(build(*SUPPORTED["llama"]), device)
        model.lm_head.weight = torch.nn.Parameter(torch.empty(512, 64, device=place))
        with pytest.raises(UnsupportedModel, match=reason):
            KVBoost(model, WordTokenizer())


def test_tensor_parallel_arguments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tp_plan: vLLM has tensor parallelism"):
        KVBoost.from_pretrained("any", tp_plan="auto")


def outcome(ticket: Ticket) -> tuple[int, ...] | None:
    try:
        return ticket.result().token_ids
    except torch.OutOfMemoryError:
        return None


@pytest.mark.parametrize("seed", range(NUM_FAULTS))
def test_out_of_memory_costs_one_request_at_most(seed: int) -> None:
    wanted = on_cpu("llama")[: len(PROMPTS)]
    with pretended(total_bytes=1 << 28) as device:
        model = to_device(build(*SUPPORTED["llama"]), device)
        with Engine(model, WordTokenizer(), chunk_size=32) as engine:
            tickets = [engine.submit(prompt, greedy(4)) for prompt in PROMPTS]
            device.fails_at = 37 + 211 * seed
            outcomes = [outcome(ticket) for ticket in tickets]
            device.fails_at = None
            assert outcomes.count(None) <= 1
            assert all(got in (None, right) for got, right in zip(outcomes, wanted, strict=True))
            engine.flush()
            assert engine._parts.pool.stats()["used_blocks"] == 0
            assert answers(engine)[: len(PROMPTS)] == wanted
