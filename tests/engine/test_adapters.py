"""Adapters on a tiny model: answers as with PEFT alone, and no K/V of one under another."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from fakes import WordTokenizer, words
from kvboost import ConfigError, KVBoost, KVBoostError, UnsupportedModel
from kvboost.core import Sampling
from kvboost.models.fingerprint import adapter_digest, adapter_layers
from loras import EVERYWHERE, adapted, answer_of, save_adapter
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny
NUM_NEW = 8


def model_of(name: str = "llama") -> Any:
    return build(*SUPPORTED[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(model_of(), root / name, seed) for seed, name in enumerate("ab")}


def engine_of(folders: dict[str, str] | None = None, **options: Any) -> KVBoost:
    return KVBoost(
        model_of(),
        WordTokenizer(),
        adapters=folders,
        **{"chunk_size": 16, "strict": True} | options,
    )


@pytest.fixture
def engine(folders: dict[str, str]) -> Iterator[KVBoost]:
    with engine_of(folders) as made:
        yield made


@pytest.fixture(scope="module")
def models(folders: dict[str, str]) -> dict[str, Any]:
    """What answers without us, by name."""
    return {"": model_of()} | {name: adapted(model_of(), at) for name, at in folders.items()}


def rows_of(engine: KVBoost) -> dict[str, Any]:
    engine.flush()
    stats = engine.cache_stats()
    assert stats["foreign_frames"] == 0
    return stats["adapters"]


def test_every_adapter_answers_as_with_peft_alone(engine: KVBoost, models: dict[str, Any]) -> None:
    shared = words(70)
    wanted: dict[str, list[int]] = {}
    for turn, name in enumerate(["a", "", "b", "b", "a", ""]):
        prompt = shared + words(20, seed=turn)
        result = engine.generate(prompt, NUM_NEW, adapter=name)
        wanted[name] = answer_of(models[name], prompt, NUM_NEW)
        assert result.token_ids == wanted[name]
        assert result.cached_tokens == (70 if turn > 2 else 0)  # first seen under each: nothing
    assert len({tuple(each) for each in wanted.values()}) == 3
    assert {name: row["cache_hits"] for name, row in rows_of(engine).items()} == {
        "": 5, "a": 5, "b": 5
    }  # fmt: skip


def test_no_name_is_the_base_model(engine: KVBoost, models: dict[str, Any]) -> None:
    prompt = words(60)
    assert engine.generate(prompt, NUM_NEW).token_ids == answer_of(models[""], prompt, NUM_NEW)
    assert engine.generate(prompt, NUM_NEW, adapter="").cached_tokens == 59


def test_a_batch_of_several_adapters_mixes_nothing(engine: KVBoost, models: dict[str, Any]) -> None:
    names = ["a", "", "b"] * 4
    prompts = [words(140, seed=9) + words(9, seed=number) for number in range(len(names))]
    results = engine.generate_batch(
        prompts, NUM_NEW, per_prompt=[{"adapter": name} for name in names]
    )
    for name, prompt, result in zip(names, prompts, results, strict=True):
        assert result.token_ids == answer_of(models[name], prompt, NUM_NEW)
    assert all(row["cache_hits"] > 0 and row["requests"] == 4 for row in rows_of(engine).values())


def test_adapters_take_turns_and_none_starves(engine: KVBoost) -> None:
    """A step of each in turn, however many requests of one run or come anew."""
    steps: list[str] = []
    batch = engine._front._batch
    compute = batch._compute

    def note(segments: Any) -> None:
        names = {member.request.adapter.name for member in segments.values()}
        assert len(names) == 1
        steps.append(names.pop())
        compute(segments)

    batch._compute = note
    endless = Sampling(max_new_tokens=100_000, ignore_eos=True)
    running = [engine.submit(words(20), endless, adapter=name) for name in ("a", "a", "b")]
    for number in range(10):  # each leaves after its first token
        engine.submit(words(8, seed=number), Sampling(max_new_tokens=1), adapter="a").result(60)
    for ticket in running:
        ticket.cancel()
    together = steps[steps.index("b") :]
    assert len(together) >= 10
    assert all(first != second for first, second in pairwise(together))


def test_streams_and_chats_have_adapters(engine: KVBoost, models: dict[str, Any]) -> None:
    prompt = words(40)
    texts = {name: "".join(engine.stream(prompt, 4, adapter=name)) for name in models}
    for name, text in texts.items():
        said = answer_of(models[name], prompt, 4)
        assert text == engine.tokenizer.decode(said, skip_special_tokens=True)
    with pytest.raises(ConfigError, match="unknown adapter"):
        engine.astream(prompt, 4, adapter="c")


def test_text_is_warmed_and_explained_for_one_adapter(engine: KVBoost) -> None:
    text = words(64)
    assert engine.warm(text, adapter="a", pin=True).num_pinned == 4
    known = {name: engine.explain([*text, 7], adapter=name).spans[0].kind.value for name in "ab"}
    assert known == {"a": "exact", "b": "miss"}
    cached = {name: engine.generate([*text, 7], 1, adapter=name).cached_tokens for name in "ab"}
    assert cached == {"a": 64, "b": 0}
    assert rows_of(engine)["a"]["cache_hits"] == 4


def test_text_that_is_warmed_beside_answers_of_another_adapter(
    engine: KVBoost, models: dict[str, Any]
) -> None:
    prompt, text = words(30), words(600, seed=5)
    ticket = engine.submit(prompt, Sampling(max_new_tokens=60, ignore_eos=True), adapter="b")
    engine.warm(text, adapter="a")
    said = list(ticket.result(60).token_ids)
    assert said[:NUM_NEW] == answer_of(models["b"], prompt, NUM_NEW)
    result = engine.generate([*text, 9], NUM_NEW, adapter="a")
    assert result.cached_tokens == 600
    assert result.token_ids == answer_of(models["a"], [*text, 9], NUM_NEW)


def test_answers_are_verified_and_audited_under_their_adapter(folders: dict[str, str]) -> None:
    """All of a moved text is computed again: an audit finds nothing, unless of another adapter."""
    with engine_of(folders, reuse="auto", recompute_ratio=1.0, audit_ratio=1.0) as engine:
        engine._parts.cost.pays = lambda *_: True  # for a tiny model nothing does
        text = words(200)
        for number, name in enumerate(["a", "b", "a"]):
            engine.generate(words(10 + number, seed=number + 1) + text, 4, adapter=name)
        moved = engine.submit(
            words(40, seed=8) + text, Sampling(max_new_tokens=4), adapter="b"
        ).result(60)
        assert any(span.kind.value == "moved" for span in moved.reuse.spans)
        engine.generate(words(20, seed=7), 1)
        engine.flush()
        assert engine.cache_stats()["audits"] == 2
        quality = engine.cache_stats()["quality"]
        assert set(quality) == {" under a", " under b"}  # judged apart
        assert all(each["mean_kl"] < 1e-6 for each in quality.values())
        for name in ("a", "b"):
            prompt = words(90, seed=4)
            assert engine.verify_correctness([prompt], 8, adapter=name)
            known = engine.generate([*prompt, 7], 1, adapter=name, reuse="exact")
            assert known.cached_tokens == 90


def test_keys_of_the_base_model_do_not_change_by_adapters(
    folders: dict[str, str], tmp_path: Path
) -> None:
    prompt = words(60)
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        engine.generate(prompt, 1)
        bare = engine._parts.model.fingerprint
    with engine_of(folders, disk_cache_dir=str(tmp_path)) as engine:
        assert engine._parts.model.fingerprint == bare
        assert engine.generate(prompt, 1).cached_tokens == 59
        assert engine.generate(prompt, 1, adapter="a").cached_tokens == 0
    with KVBoost(adapted(model_of(), folders["a"]), WordTokenizer()) as engine:
        model = engine._parts.model
        assert model.fingerprint != bare
        assert model.under(model.adapters.find("")).fingerprint == bare


def test_an_adapter_is_known_by_its_weights_not_by_its_name(
    folders: dict[str, str], tmp_path: Path
) -> None:
    prompt, options = words(60), {"chunk_size": 16, "disk_cache_dir": str(tmp_path)}
    with engine_of({"a": folders["a"]}, **options) as engine:
        engine.generate(prompt, 1, adapter="a")
    with engine_of({"b": folders["b"], "a": folders["b"]}, **options) as engine:
        assert engine.generate(prompt, 1, adapter="a").cached_tokens == 0
        engine.load_adapter("c", folders["a"])
        assert engine.generate(prompt, 1, adapter="c").cached_tokens == 59
        engine.load_adapter("a", folders["a"])
        assert engine.generate(prompt, 1, adapter="a").cached_tokens == 59
        assert engine.adapters == ["a", "b", "c"]
        assert len(engine._parts.model.model.peft_config) == 3  # what was replaced is gone
    with KVBoost(adapted(model_of(), folders["a"]), WordTokenizer(), **options) as engine:
        assert engine.generate(prompt, 1).cached_tokens == 59


def test_an_adapter_with_another_strength_has_other_keys(
    folders: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folders["a"], tmp_path / "strong")
    config = tmp_path / "strong" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 32}))
    with engine_of({"a": folders["a"], "strong": str(tmp_path / "strong")}) as engine:
        prompt = words(60)
        first = engine.generate(prompt, NUM_NEW, adapter="a")
        other = engine.generate(prompt, NUM_NEW, adapter="strong")
        assert other.cached_tokens == 0
        assert other.token_ids != first.token_ids


def test_a_strength_that_was_changed_in_the_layers_counts(folders: dict[str, str]) -> None:
    model = adapted(model_of(), folders["a"]).get_base_model()
    before = adapter_digest(model, "default")
    for layer in adapter_layers(model).values():
        layer.scaling["default"] *= 2
    assert adapter_digest(model, "default") != before


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"use_rslora": True, "lora_alpha": 16},
        {"modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"trainable_token_indices": [5, 6, 7]},
    ],
    ids=str,
)
def test_other_kinds_of_layers_work_beside_a_plain_one(
    settings: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    folder = save_adapter(model_of(), tmp_path / "kind", 7, **settings)
    with engine_of({"a": folders["a"], "kind": folder}) as engine:
        prompt = [5, 6, 7, *words(50)]
        for name, wanted in (
            ("kind", adapted(model_of(), folder)),
            ("", model_of()),
            ("a", adapted(model_of(), folders["a"])),
            ("kind", adapted(model_of(), folder)),
        ):
            result = engine.generate(prompt, NUM_NEW, adapter=name)
            assert result.token_ids == answer_of(wanted, prompt, NUM_NEW)
            (other,) = engine.generate_batch([prompt], NUM_NEW, adapter=name)
            assert other.token_ids == result.token_ids
        assert result.cached_tokens == 52
        bare = KVBoost(model_of(), WordTokenizer())._parts.model.fingerprint
        assert engine._parts.model.fingerprint == bare


def test_a_model_comes_with_its_adapter_in_use(folders: dict[str, str]) -> None:
    prompt, model = words(50), adapted(model_of(), folders["a"])
    wanted = answer_of(model, prompt, NUM_NEW)
    with KVBoost(model, WordTokenizer()) as engine:
        assert engine.adapters == ["default"]
        assert engine.generate(prompt, NUM_NEW).token_ids == wanted
        base = engine.generate(prompt, NUM_NEW, adapter="")
        assert base.token_ids == answer_of(model_of(), prompt, NUM_NEW)
        assert base.cached_tokens == 0
        engine.load_adapter("b", folders["b"])
        assert engine.generate(prompt, 1, adapter="b").cached_tokens == 0
        for change in (engine.unload_adapter, lambda name: engine.load_adapter(name, folders["b"])):
            with pytest.raises(ConfigError, match="adapter 'default' is part of the loaded model"):
                change("default")
        engine.generate(prompt, 1, adapter="")
    assert answer_of(model, prompt, NUM_NEW) == wanted
    assert "b" not in model.peft_config


def test_a_model_is_given_back_without_adapters(folders: dict[str, str]) -> None:
    model, ids = model_of(), torch.tensor([words(20)])
    names = [(name, each.requires_grad) for name, each in model.named_parameters()]
    wanted = model(ids).logits
    with KVBoost(model, WordTokenizer(), adapters=folders) as engine:
        engine.generate(words(20), 1, adapter="a")
    assert [(name, each.requires_grad) for name, each in model.named_parameters()] == names
    assert torch.equal(model(ids).logits, wanted)
    assert not model._hf_peft_config_loaded and not hasattr(model, "peft_config")


def test_an_unknown_adapter_is_named_with_those_there_are(
    engine: KVBoost, folders: dict[str, str]
) -> None:
    engine.load_adapter("german", folders["a"])
    with pytest.raises(ConfigError, match=r"'germn' \('a', 'b', 'german'\); did you mean 'german'"):
        engine.generate(words(9), 1, adapter="germn")
    with pytest.raises(ConfigError, match="unknown adapter 'x'"):
        engine.submit(words(9), adapter="x")
    with pytest.raises(ConfigError, match="unknown adapter 'x'"):
        engine.unload_adapter("x")
    with pytest.raises(ConfigError, match="not empty"):
        engine.load_adapter("", "folder")


def test_an_adapter_that_is_unloaded_ends_its_requests(
    engine: KVBoost, models: dict[str, Any]
) -> None:
    endless = Sampling(max_new_tokens=100_000, ignore_eos=True)
    gone, stays = (engine.submit(words(20), endless, adapter=name) for name in ("a", "b"))
    engine.unload_adapter("a")
    with pytest.raises(KVBoostError, match="'a' was unloaded"):
        gone.result(60)
    assert not stays.future.done()
    stays.cancel()
    assert engine.adapters == ["b"]
    prompt = words(30)
    result = engine.generate(prompt, NUM_NEW, adapter="b")
    assert result.token_ids == answer_of(models["b"], prompt, NUM_NEW)


def test_a_switch_by_somebody_else_does_no_harm(engine: KVBoost, models: dict[str, Any]) -> None:
    prompt = words(40)
    engine.generate(prompt, 1, adapter="a")
    for layer in adapter_layers(engine._parts.model.model).values():
        layer.enable_adapters(False)
    result = engine.generate(prompt, NUM_NEW, adapter="a")
    assert result.token_ids == answer_of(models["a"], prompt, NUM_NEW)


def test_all_adapters_of_a_tenant_are_forgotten_and_counted_together(engine: KVBoost) -> None:
    prompt = words(64)
    for name in ("", "a", "b"):
        engine.generate(prompt, 1, adapter=name, tenant="t")
    engine.flush()
    stats = engine.cache_stats()
    assert stats["tenants"]["t"]["memory_bytes"] == stats["hot_memory_mb"] * 2**20 > 0
    assert len(engine.contents.chunks("t", 100)) == 12
    assert len(engine.contents.chunks("t", 5)) == 5
    assert engine.contents.pin(prompt, tenant="t", ttl_s=None) == 12
    assert engine.contents.delete(prompt[:20], tenant="t").num_deleted == 6
    assert engine.contents.delete(None, tenant="t").num_deleted == 6


def test_deterministic_prefill_has_adapters(folders: dict[str, str]) -> None:
    with engine_of(folders, deterministic=True, piece_tokens=32) as engine:
        prompt = words(80)
        cold = engine.submit(prompt, Sampling(max_new_tokens=8), adapter="a").result(60)
        other = engine.submit(prompt, Sampling(max_new_tokens=8), adapter="b").result(60)
        warm = engine.submit(prompt, Sampling(max_new_tokens=8), adapter="a").result(60)
        assert (cold.cached_tokens, other.cached_tokens, warm.cached_tokens) == (0, 0, 64)
        assert cold.token_ids == warm.token_ids != other.token_ids


def spoil(folder: str, tmp_path: Path, change: Any) -> str:
    """A copy of an adapter with other tensors."""
    shutil.copytree(folder, tmp_path / "spoilt")
    file = tmp_path / "spoilt" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return str(tmp_path / "spoilt")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(sorted(tensors)[0]), "lacks 1 tensors"),
        (lambda tensors: tensors.update(lora_C=torch.ones(3)), "for no layer, 1 tensors"),
    ],
)
def test_an_adapter_with_other_tensors_is_refused(
    change: Any, reason: str, folders: dict[str, str], tmp_path: Path, engine: KVBoost
) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine.load_adapter("spoilt", spoil(folders["a"], tmp_path, change))
    assert engine.adapters == ["a", "b"]
    assert len(engine._parts.model.model.peft_config) == 2


def test_adapters_that_change_the_base_model_are_refused(
    engine: KVBoost, folders: dict[str, str], tmp_path: Path, models: dict[str, Any]
) -> None:
    for number, (setting, reason) in enumerate(
        [
            ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
            ({"layer_replication": [[0, 4], [2, 6]]}, "repeats layers"),
            ({"alora_invocation_tokens": [5]}, "aLoRA"),
            ({"target_modules": ["nothing"]}, "not found in the base model"),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(folders["a"], folder)
        config = folder / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | setting))
        with pytest.raises(ConfigError, match=reason):
            engine.load_adapter("bad", str(folder))
    with pytest.raises(ConfigError, match="adapter 'bad' of nowhere-at-all"):
        engine.load_adapter("bad", "nowhere-at-all")
    prompt = words(40)
    for name in ("", "a"):
        result = engine.generate(prompt, NUM_NEW, adapter=name)
        assert result.token_ids == answer_of(models[name], prompt, NUM_NEW)


def test_an_adapter_that_changes_the_shape_of_kv_is_refused(
    engine: KVBoost, folders: dict[str, str]
) -> None:
    model = engine._parts.model
    model.geometry = replace(model.geometry, num_layers=5)
    with pytest.raises(ConfigError, match="changes the shape of K/V"):
        engine.load_adapter("wide", folders["a"])


def test_weights_that_an_adapter_has_changed_end_the_engine(
    engine: KVBoost, folders: dict[str, str]
) -> None:
    """Whatever kind of adapter does so without saying it in its config."""
    engine._parts.model.model.get_output_embeddings().weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match="changed the base model's weights"):
        engine.load_adapter("bad", folders["a"])
    with pytest.raises(KVBoostError, match="changed the base model's weights"):
        engine.generate(words(20), 1)


def test_adapters_that_are_no_layers_are_refused(engine: KVBoost, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    folder = save_adapter(model_of(), tmp_path, config=config)
    with pytest.raises(ConfigError, match="PROMPT_TUNING puts K/V of its own before prompts"):
        engine.load_adapter("soft", folder)
    with pytest.raises(UnsupportedModel, match="PROMPT_TUNING"):
        KVBoost(adapted(model_of(), folder), WordTokenizer())


def test_models_that_cannot_be_switched_are_refused() -> None:
    both = get_peft_model(model_of(), LoraConfig(target_modules=EVERYWHERE, r=2))
    both.add_adapter("other", LoraConfig(target_modules=EVERYWHERE, r=2))
    both.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedModel, match="several adapters are active"):
        KVBoost(both, WordTokenizer())
    merged = get_peft_model(model_of(), LoraConfig(target_modules=EVERYWHERE, r=2))
    merged.merge_adapter()
    with pytest.raises(UnsupportedModel, match="merged"):
        KVBoost(merged, WordTokenizer())


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with engine_of() as engine, pytest.raises(ConfigError, match="pip install peft"):
        engine.load_adapter("a", "folder")
    with pytest.raises(ConfigError, match="pip install peft"):
        engine_of({"a": "folder"})


def test_a_model_without_reuse_has_adapters_too(folders: dict[str, str]) -> None:
    with engine_of(folders) as engine:
        engine._parts.model.refusal = "for the test"
        prompt = words(40)
        said = engine.generate(prompt, NUM_NEW, adapter="a").token_ids
        assert said == answer_of(adapted(model_of(), folders["a"]), prompt, NUM_NEW)
