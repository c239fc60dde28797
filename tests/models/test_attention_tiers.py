"""Attention tiers: those of CPUs for real, those of GPUs at the seam, with kernels that we play."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.profiler import profile
from transformers import DynamicCache, PreTrainedModel, StaticCache

from fakes import WordTokenizer, words
from kvboost import (
    ConfigError,
    KVBoost,
    UnsupportedModel,
    flash_attention_available,
    get_flash_attn_tier,
    install_flash_attention,
    uninstall_flash_attention,
)
from kvboost.models import attention, certify, kernels
from kvboost.models.hf import HFModel
from tiny_models import REFUSED, SUPPORTED, build

pytestmark = pytest.mark.tiny

ARCHITECTURES = ["llama", "mistral-sliding", "llama4-chunked-nope", "deepseek_v3-mla"]
FLASH_OP = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH_OP = "aten::_scaled_dot_product_attention_math"
uses_slow_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def seen(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Of the last queries: which keys each sees."""
    keys = torch.arange(num_keys)
    own = keys[-num_queries:, None]
    return (keys <= own) & (keys > own - (window or num_keys))


class FlashAttn:
    """The package at its seam: [batch, tokens, heads, head_dim], causal to the last query."""

    __spec__ = ModuleSpec("flash_attn", None)  # which Transformers looks for, once a process

    def __init__(self, *, is_aligned_to_first: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._is_aligned_to_first = is_aligned_to_first

    def flash_attn_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        assert causal and dropout_p == 0.0 and window_size[1] == (0 if window_size[0] > 0 else -1)
        assert q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
        assert k.shape == v.shape and q.shape[2] % k.shape[2] == 0 and q.shape[1] <= k.shape[1]
        window = None if window_size[0] < 0 else window_size[0] + 1
        self.calls.append({"queries": q.shape[1], "keys": k.shape[1], "window": window})
        mask = seen(q.shape[1], k.shape[1], window)
        if self._is_aligned_to_first:
            mask = torch.ones_like(mask).tril()
        output = F.scaled_dot_product_attention(
            *(x.transpose(1, 2).float() for x in (q, k, v)),
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )
        return output.transpose(1, 2).to(q.dtype)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    fake = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    return fake


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """torch says that there is a GPU of this capability."""
    gpu = SimpleNamespace(capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu.capability)
    return gpu


@torch.no_grad()
def steps(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt, 80 appended tokens, 20, one; then of two prompts, one of them padded."""
    cache, parts, first = DynamicCache(), [], 0
    for stop in (40, 120, 140, 141):
        ids = torch.tensor([tokens[first:stop]])
        parts.append(model(input_ids=ids, past_key_values=cache).logits[0])
        first = stop
    two = torch.tensor([tokens[:30], tokens[30:60]])
    padding = torch.ones_like(two)
    padding[0, :9] = 0
    padded = model(input_ids=two, attention_mask=padding).logits
    return torch.cat([*parts, padded[0, 9:], padded[1]])


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((ours - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)).max())


def implementation(model: PreTrainedModel) -> str:
    return model.config._attn_implementation


def test_cpus_have_torchs_flash_kernel_and_other_devices_plain_sdpa() -> None:
    assert get_flash_attn_tier("cpu") == "flash_sdpa" and flash_attention_available("cpu")
    assert get_flash_attn_tier("mps") == "sdpa" and not flash_attention_available("mps")


def test_gpus_have_what_their_capability_and_the_package_allow(
    a100: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_flash_attn_tier() == "flash_sdpa"
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttn())
    assert get_flash_attn_tier() == "flash_attn" and get_flash_attn_tier("cpu") == "flash_sdpa"
    cuda = torch.device("cuda")
    assert kernels.tier_refusal("flash_attn", cuda, torch.bfloat16) == ""
    assert "not float32" in kernels.tier_refusal("flash_sdpa", cuda, torch.float32)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    assert get_flash_attn_tier() == "flash_sdpa"  # a package that is broken
    a100.capability = (7, 5)
    assert get_flash_attn_tier() == "sdpa" and not flash_attention_available()
    assert "this one has 7.5" in kernels.tier_refusal("flash_sdpa", cuda)


@pytest.mark.parametrize("tier", ["flash_sdpa", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_installed_tier_gives_the_models_own_logits(name: str, tier: str) -> None:
    model, tokens = build(*SUPPORTED[name]), words(141)
    native, own = steps(model, tokens), implementation(model)
    assert install_flash_attention(model, tier) == tier
    assert distance(steps(model, tokens), native) < 1e-5
    uninstall_flash_attention(model)
    assert implementation(model) == own and torch.equal(steps(model, tokens), native)


def test_a_static_cache_works_with_every_tier() -> None:
    model, prompt = build(*SUPPORTED["llama"]), torch.tensor([words(30)])
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    native = model.generate(prompt, **settings).tolist()
    for tier in ("flash_sdpa", "sdpa"):
        install_flash_attention(model, tier)
        cache = StaticCache(config=model.config, max_cache_len=64)
        assert model.generate(prompt, past_key_values=cache, **settings).tolist() == native


def test_installing_again_changes_the_tier_and_uninstalling_again_does_nothing() -> None:
    model = build(*SUPPORTED["llama"])
    native = implementation(model)
    assert install_flash_attention(model) == "flash_sdpa"
    assert install_flash_attention(model, "sdpa") == "sdpa"
    assert implementation(model) == attention.IMPLEMENTATIONS["sdpa"]
    uninstall_flash_attention(model)
    assert implementation(model) == native
    model.set_attn_implementation("eager")
    uninstall_flash_attention(model)
    assert implementation(model) == "eager"


def test_what_cannot_run_is_refused_with_the_reason(package: FlashAttn) -> None:
    model = build(*SUPPORTED["llama"])
    with pytest.raises(ConfigError, match="'flash_attn' cannot run here: it needs a CUDA device"):
        install_flash_attention(model, "flash_attn")
    with pytest.raises(ConfigError, match="expected one of flash_attn, flash_sdpa, sdpa"):
        install_flash_attention(model, "flash")
    assert implementation(model) == "sdpa"
    chunked = build(*SUPPORTED["llama4-chunked-nope"])
    with pytest.raises(ConfigError, match="the model does not support it"):
        install_flash_attention(chunked, "flash_attn")
    model.set_attn_implementation("eager")
    for eager in (model, build(*SUPPORTED["gpt_oss-sinks"])):
        with pytest.raises(ConfigError, match="soft-caps and sinks"):
            install_flash_attention(eager)
    with pytest.raises(UnsupportedModel, match="cannot be replaced"):
        install_flash_attention(build(*REFUSED["falcon"][:2]))


@pytest.mark.parametrize("tier", ["flash_sdpa", "sdpa"])
def test_an_engine_keeps_an_installed_tier_and_gives_the_model_back_with_it(tier: str) -> None:
    model = build(*SUPPORTED["llama"])
    install_flash_attention(model, tier)
    installed = implementation(model)
    with KVBoost(model, WordTokenizer(), chunk_size=16) as engine:
        assert implementation(model) == installed
        for call in (install_flash_attention, uninstall_flash_attention):
            with pytest.raises(ConfigError, match="an engine uses the model"):
                call(model)
        with pytest.raises(UnsupportedModel, match="an engine has it already"):
            KVBoost(model, WordTokenizer())
        prompt = words(60)
        cold, warm = (engine.generate(prompt, 8) for _ in range(2))
        assert cold.token_ids == warm.token_ids and warm.cached_tokens == 59
    assert implementation(model) == installed
    uninstall_flash_attention(model)
    assert implementation(model) == "sdpa"


def test_the_plain_tier_never_runs_a_flash_kernel() -> None:
    """Scattered, appended and packed: what certification runs are all ways that attention has."""
    ran = {}
    for tier in ("flash_sdpa", "sdpa"):
        model = build(*SUPPORTED["llama"])
        with torch.no_grad():
            native = certify.run_native(model, certify.measure_geometry(model))
        install_flash_attention(model, tier)
        hosted = HFModel(model)
        with torch.no_grad(), profile(acc_events=True) as ops:
            certify.check_sparse_prefill(model, hosted.geometry, native)
            assert certify.check_packed(model, hosted.geometry, native)[0] == ""
        ran[tier] = {event.key for event in ops.key_averages()}
    assert FLASH_OP in ran["flash_sdpa"] and MATH_OP not in ran["flash_sdpa"]
    assert FLASH_OP not in ran["sdpa"] and MATH_OP in ran["sdpa"]
    assert torch.backends.cuda.flash_sdp_enabled()


@uses_slow_flex
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("window", [None, 24])
def test_flex_attention_is_attention_under_an_explicit_mask(
    num_heads: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 2, 300, 16, generator=generator)
    positions = torch.randperm(300, generator=generator)[:130]
    query = torch.randn(1, num_heads, 130, 16, generator=generator)

    def rule(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - (window or 300))

    mask = kernels.scattered_mask(rule, positions, 300)
    ours = kernels.attend_scattered(query, key, value, mask, 0.3)
    explicit = rule(0, 0, positions[:, None], torch.arange(300))
    wanted = F.scaled_dot_product_attention(
        query, key, value, attn_mask=explicit, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(ours, wanted, atol=1e-5)


@pytest.mark.parametrize("num_queries", [5, 12])
def test_torchs_lower_right_attention_is_that_of_the_last_tokens(num_queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 2, 12, 16, generator=generator)
    query = torch.randn(1, 6, num_queries, 16, generator=generator)
    wanted = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen(num_queries, 12, None), scale=0.3, enable_gqa=True
    )
    assert torch.allclose(kernels.attend_lower_right(query, key, value, 0.3), wanted, atol=1e-6)


def with_package(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model that runs with the package's tier, though this is no GPU."""
    attention.register()
    model = build(*SUPPORTED[name]).to(dtype)
    model.set_attn_implementation(attention.IMPLEMENTATIONS["flash_attn"])
    return model


@pytest.mark.parametrize(
    ("width", "value_width", "dtype", "fits"),
    [
        (64, 64, torch.bfloat16, True),
        (256, 256, torch.float16, True),
        (264, 264, torch.float16, False),
        (20, 20, torch.float16, False),
        (64, 32, torch.float16, False),
        (64, 64, torch.float32, False),
    ],
)
def test_the_flash_attn_package_takes_what_its_kernels_are_built_for(
    width: int, value_width: int, dtype: torch.dtype, fits: bool
) -> None:
    query, value = torch.empty(1, 2, 3, width, dtype=dtype), torch.empty(1, 2, 3, value_width)
    assert kernels.fits_package(query, value) == fits


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "granite", "mistral-sliding", "deepseek_v3-mla"])
def test_appended_tokens_reach_the_flash_attn_package_if_it_takes_them(
    package: FlashAttn, name: str, dtype: torch.dtype
) -> None:
    tokens = words(141)
    native = steps(build(*SUPPORTED[name]).to(dtype), tokens)
    ours = steps(with_package(name, dtype), tokens)
    assert distance(ours, native) < (2e-2 if dtype == torch.float16 else 1e-5)
    if dtype == torch.float32 or name == "deepseek_v3-mla":
        assert package.calls == []
        return
    window = 24 if name == "mistral-sliding" else None
    sizes = [(40, 40), (80, 120), (20, 140), (1, 141)]
    num_layers = 6
    wanted = [
        {"queries": q, "keys": k, "window": window} for q, k in sizes for _ in range(num_layers)
    ]
    assert package.calls == wanted  # and no call for the padded batch


@uses_slow_flex
@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_scattered_tokens_of_a_model_go_through_flex_attention(
    package: FlashAttn, name: str
) -> None:
    tokens = words(200)
    with torch.no_grad():
        native = build(*SUPPORTED[name])(input_ids=torch.tensor([tokens])).logits[0]
    model = HFModel(with_package(name, torch.float32))
    slots = model.fresh_rows(200)
    model.forward(slots, tokens, list(range(200)))
    again = list(range(3, 200, 3)) + list(range(1, 200, 3)) + [199]
    for plane in slots.read(certify.Span(0, 200)):
        plane[:, :, again] = 9.0
    masks = []
    model.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    logits = model.forward(slots, [tokens[p] for p in again], again, num_logits=len(again))
    assert distance(logits, native[again]) < 1e-5
    assert [type(mask) for mask in masks] == [BlockMask]
    few = again[: kernels.FLEX_QUERIES - 1]
    model.forward(slots, [tokens[p] for p in few], few)
    assert type(masks[1]) is torch.Tensor


def test_flex_attention_is_left_out_for_padding_and_for_static_caches() -> None:
    asked: dict[str, Any] = {"batch_size": 1, "q_length": 130, "kv_length": 200}
    positions = torch.arange(0, 200, 2)[:130]
    positions = torch.cat([positions, torch.arange(170, 200)])
    offsets = positions - torch.arange(130)
    padding = torch.ones(1, 200, dtype=torch.bool)
    make = partial(attention._mask_one, "flash_attn", **asked)
    assert type(make(q_offset=offsets, attention_mask=padding)) is BlockMask
    padding[0, :5] = False
    explicit = make(q_offset=offsets, attention_mask=padding)
    assert torch.equal(explicit[0, 0] == 0, seen(200, 200, None)[positions] & padding)
    assert type(make(q_offset=torch.tensor(20))) is torch.Tensor
    for tier in ("flash_sdpa", "sdpa"):  # CPUs have no kernel for it
        assert type(attention._mask_one(tier, q_offset=offsets, **asked)) is torch.Tensor


@pytest.mark.parametrize(
    ("tier", "num_queries", "more", "is_made"),
    [
        ("flash_attn", 20, {}, False),
        ("flash_sdpa", 80, {}, False),
        ("flash_sdpa", 20, {}, True),  # faster on CPUs
        ("flash_sdpa", 1, {}, False),
        ("sdpa", 80, {}, True),
        ("sdpa", 100, {}, False),
        ("flash_attn", 20, {"allow_is_causal_skip": False}, True),
        ("flash_attn", 20, {"local_size": 24, "window": 24}, False),
        ("flash_attn", 20, {"local_size": 24, "window": None}, True),  # chunks
        ("flash_attn", 20, {"local_size": 200, "window": None}, False),
        ("flash_sdpa", 80, {"local_size": 24, "window": 24}, True),
    ],
)
def test_a_mask_is_made_only_where_a_tier_needs_it(
    tier: str, num_queries: int, more: dict[str, Any], is_made: bool
) -> None:
    config = SimpleNamespace(sliding_window=more.pop("window", None))
    sizes = {"q_length": num_queries, "kv_length": 100, "q_offset": 100 - num_queries}
    mask = attention._mask_one(tier, batch_size=1, config=config, **sizes, **more)
    assert (mask is not None) == is_made


def test_a_kernel_that_is_wrong_or_fails_is_not_chosen(
    package: FlashAttn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = HFModel(build(*SUPPORTED["llama"]).half())
    with torch.no_grad():
        native = certify.run_native(model.model, model.geometry)
        choices = [attention.IMPLEMENTATIONS[tier] for tier in kernels.TIERS]
        model._choose_attention(choices, native)
        assert implementation(model.model) == choices[0] and package.calls
        for broken in (FlashAttn(is_aligned_to_first=True), SimpleNamespace(flash_attn_func=None)):
            monkeypatch.setitem(sys.modules, "flash_attn", broken)
            model._choose_attention(choices, native)
            assert implementation(model.model) == choices[1]
            with pytest.raises((UnsupportedModel, TypeError, AssertionError)):
                model._choose_attention(choices[:1], native)


def test_an_installed_tier_is_measured_against_the_models_own_attention() -> None:
    model, ran = build(*SUPPORTED["llama"]), []
    install_flash_attention(model, "flash_sdpa")
    installed = implementation(model)
    model.register_forward_pre_hook(lambda module, args: ran.append(implementation(model)))
    HFModel(model).release()
    assert ran[0] == "sdpa" and ran[-1] == installed and {*ran} == {"sdpa", installed}
