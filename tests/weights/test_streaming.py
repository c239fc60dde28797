"""Models whose weights come and go answer as they do with all of them in memory."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fakes import WordTokenizer, words
from kvboost import ConfigError, KVBoost
from kvboost.models.fingerprint import fingerprint
from kvboost.models.hf import HFModel
from kvboost.models.load import load
from kvboost.weights import pages
from kvboost.weights.awq import AWQLinear
from kvboost.weights.carrier import Brought, DeviceCopies, Tensors
from kvboost.weights.stream import StreamedWeights, stream_weights, streamed
from loras import save_adapter
from quantised_checkpoints import COLUMN_OF_NIBBLE, pack, quantise_awq, save_awq
from tiny_models import build, save

pytestmark = pytest.mark.tiny

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096}
"""29 MB in float32: an embedding and an output layer of 4 MB, linear layers of up to 1 MB."""
MB = 2**20


def saved(folder: Path, model_type: str = "llama", **differences: object) -> PreTrainedModel:
    build(model_type, WIDE | differences).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: PreTrainedModel, num_tokens: int = 40) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([words(num_tokens)])).logits


@pytest.mark.parametrize(
    ("model_type", "differences"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"intermediate_size": 1000}),
        ("gemma3_text", {"head_dim": 64}),  # scales its embeddings
        ("gpt_neox", {}),
        ("gpt2", {"n_embd": 256, "n_inner": 1024}),  # no linear layers, positions in a table
    ],
)
@pytest.mark.parametrize("carrier", ["pages", "copies"])
def test_logits_are_those_of_the_whole_model(
    tmp_path: Path, model_type: str, differences: dict[str, object], carrier: str
) -> None:
    model = saved(tmp_path, model_type, **differences)
    wanted = logits(model)
    if carrier == "pages":
        weights = stream_weights(model, 12 * MB)
    else:
        weights = StreamedWeights(model, 12 * MB, DeviceCopies(torch.device("cpu")))
    for _ in range(3):
        # Kernels may sum in another order where a layer was cut.
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    stats = weights.stats
    assert stats.streamed_bytes > 0
    assert stats.resident_bytes + stats.window_bytes <= 12 * MB
    assert stats.peak_window_bytes <= stats.window_bytes
    assert 0 < stats.num_waits < stats.num_uses
    weights.close()
    closed = weights.stats  # read-ahead may have brought another piece since the last forward
    assert streamed(model) is None
    assert torch.equal(logits(model), wanted)
    assert weights.stats == closed


def test_layers_that_are_not_cut_compute_the_same_bits(tmp_path: Path) -> None:
    model = saved(tmp_path, vocab_size=512)
    wanted = logits(model)
    weights = stream_weights(model, 17 * MB)
    for _ in range(3):
        assert torch.equal(logits(model), wanted)
    assert weights.stats.streamed_bytes > 0


def test_a_generous_budget_streams_nothing(tmp_path: Path) -> None:
    model = saved(tmp_path)
    weights = stream_weights(model, "500MB")
    logits(model)
    assert weights.stats.streamed_bytes == weights.stats.window_bytes == 0


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """However much is run or read; a page may be as large as 2 MB."""
    model = saved(tmp_path, hidden_size=512, intermediate_size=4096, vocab_size=16384)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 200 * MB
    most, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.0005):
            most = max(most, mapped_bytes(tmp_path))

    weights = stream_weights(model, 64 * MB)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5):
        logits(model, 200)
    fingerprint(model, HFModel(build("llama", {})).geometry)
    is_over.set()
    watcher.join()
    assert 40 * MB < most <= 64 * 1.1 * MB
    assert weights.stats.streamed_bytes > 5 * 100 * MB


def mapped_bytes(folder: Path) -> int:
    """What this process has in memory of the files in a folder."""
    counts, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_ours = str(folder) in line
        elif is_ours and line.startswith("Rss:"):
            counts += int(line.split()[1]) * 1024
    return counts


def test_an_engine_answers_and_reuses_as_without_streaming(tmp_path: Path) -> None:
    folder = save(tmp_path)
    build("llama", WIDE | {"eos_token_id": 999}).save_pretrained(folder)
    with KVBoost.from_pretrained(folder) as whole:
        answers = [whole.generate(words(n), 8).token_ids for n in (50, 300, 300)]
        known = whole._parts.model.fingerprint
    with KVBoost.from_pretrained(folder, max_weight_bytes=6 * MB) as engine:
        assert engine._parts.model.fingerprint == known
        results = [engine.generate(words(n), 8) for n in (50, 300, 300)]
        batch = engine.generate_batch([words(50), words(300)], 8)
    assert [each.token_ids for each in results] == answers
    assert [each.token_ids for each in batch] == answers[:2]
    assert [each.cached_tokens for each in results] == [0, 50, 299]


def test_adapters_work_on_streamed_weights(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    base = build("llama", WIDE | {"eos_token_id": 999})
    base.save_pretrained(folder)
    adapters = {"first": save_adapter(base, tmp_path / "first", seed=1)}
    with KVBoost.from_pretrained(folder, adapters=adapters) as whole:
        wanted = [whole.generate(words(50), 8, adapter=name).token_ids for name in ("", "first")]
    with KVBoost.from_pretrained(folder, adapters=adapters, max_weight_bytes=6 * MB) as engine:
        for _ in range(2):
            given = [engine.generate(words(50), 8, adapter=name) for name in ("", "first")]
            assert [each.token_ids for each in given] == wanted
    assert [each.cached_tokens for each in given] == [49, 49]
    assert wanted[0] != wanted[1]


def test_an_adapter_that_replaces_streamed_layers_is_refused(tmp_path: Path) -> None:
    """PEFT copies the layer with its way to compute, which has the original's weights."""
    folder = save(tmp_path / "model")
    base = build("llama", WIDE)
    base.save_pretrained(folder)
    kept = save_adapter(base, tmp_path / "kept", modules_to_save=["embed_tokens"])
    with KVBoost.from_pretrained(folder, max_weight_bytes=6 * MB) as engine:
        with pytest.raises(ConfigError, match="replaces a layer whose weights are streamed"):
            engine.load_adapter("kept", kept)
        assert engine.adapters == []
        engine.generate(words(20), 2)


class LateCopies(DeviceCopies):
    """A device on which copies are empty until they are waited for, and which counts them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.live: list[weakref.ref[torch.Tensor]] = []
        self.most_bytes = 0
        self._late: dict[int, Tensors] = {}

    def bring(self, tensors: Tensors) -> Brought:
        brought = Brought([torch.full_like(tensor, torch.nan) for tensor in tensors])
        self._late[id(brought)] = tensors
        self.live += [weakref.ref(tensor) for tensor in brought.tensors]
        held = [tensor for each in self.live if (tensor := each()) is not None]
        self.most_bytes = max(self.most_bytes, sum(tensor.nbytes for tensor in held))
        return brought

    def await_arrival(self, brought: Brought) -> None:
        for copy, tensor in zip(brought.tensors, self._late[id(brought)], strict=True):
            copy.copy_(tensor)


def test_copies_are_awaited_and_none_outlives_its_room(tmp_path: Path) -> None:
    model = saved(tmp_path)
    wanted = logits(model)
    carrier = LateCopies()
    weights = StreamedWeights(model, 12 * MB, carrier)
    for _ in range(3):
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    assert carrier.most_bytes <= weights.stats.window_bytes


def test_a_fingerprint_leaves_one_copy_of_what_stays(tmp_path: Path) -> None:
    model = saved(tmp_path, vocab_size=512)
    geometry = HFModel(build("llama", {})).geometry
    known = fingerprint(model, geometry)
    weights = StreamedWeights(model, 17 * MB, DeviceCopies(torch.device("cpu")))
    assert fingerprint(model, geometry) == known
    placed = {p.brought.tensors[0].data_ptr() for p in weights._resident if p.brought is not None}
    assert len(placed) > 3
    assert placed <= {tensor.data_ptr() for tensor in model.parameters()}


def test_an_interrupted_forward_does_not_keep_its_piece(tmp_path: Path) -> None:
    model = saved(tmp_path)
    wanted = logits(model)
    weights = stream_weights(model, 12 * MB)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for layer in model.model.layers:
        hook = layer.self_attn.o_proj.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
        hook.remove()
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    assert not any(piece.num_users for piece in weights._window._held)


def test_a_model_is_as_it_was_when_streaming_could_not_begin(tmp_path: Path) -> None:
    class Full(DeviceCopies):
        def place(self, tensor: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    model = saved(tmp_path)
    wanted = logits(model)
    with pytest.raises(MemoryError):
        StreamedWeights(model, 12 * MB, Full(torch.device("cpu")))
    assert streamed(model) is None
    assert torch.equal(logits(model), wanted)


def test_pages_leave_the_systems_cache_once_it_did_not_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was read again for a piece: its pages would not be there for the next forward."""
    model = saved(tmp_path)
    forgotten: list[tuple[int, int]] = []
    read = iter(range(0, 10**15, 10**9))
    monkeypatch.setattr(pages, "bytes_from_disk", lambda: 0)
    monkeypatch.setattr(
        pages.os, "posix_fadvise", lambda _, start, size, __: forgotten.append((start, size))
    )
    wanted = logits(model)
    stream_weights(model, 6 * MB)
    for _ in range(3):
        logits(model)
    assert forgotten == []
    monkeypatch.setattr(pages, "bytes_from_disk", lambda: next(read))
    for _ in range(3):
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert len(forgotten) > 20
    assert all(start >= 0 and start + length <= size for start, length in forgotten)


def test_weights_that_are_not_in_files_count_as_resident(tmp_path: Path) -> None:
    model = saved(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="another dtype than they are stored in"):
        stream_weights(half, 6 * MB)
    with pytest.raises(ConfigError, match="max_weight_bytes=1048576: expected about"):
        stream_weights(model, MB)
    with pytest.raises(ConfigError, match="whole number above 0"):
        stream_weights(model, 1.5e9)  # type: ignore[arg-type]
    assert streamed(model) is None


def test_weights_that_were_changed_in_memory_are_not_dropped(tmp_path: Path) -> None:
    model = saved(tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(ConfigError, match="stay in memory"):
        stream_weights(model, 6 * MB)


def test_streaming_goes_with_neither_a_second_stream_nor_other_placements(tmp_path: Path) -> None:
    folder = save(tmp_path)
    build("llama", WIDE).save_pretrained(folder)
    with pytest.raises(ConfigError, match="device_map both say"):
        KVBoost.from_pretrained(folder, max_weight_bytes=6 * MB, device_map="cpu")
    model = saved(tmp_path, dtype="bfloat16")
    stream_weights(model, 5 * MB)
    with pytest.raises(ConfigError, match="streamed already"):
        stream_weights(model, 5 * MB)
    with pytest.raises(ConfigError, match="prepack_weights=True keeps all weights"):
        KVBoost(model, WordTokenizer(), prepack_weights=True)
    with pytest.raises(ConfigError, match="the model is on meta"):
        stream_weights(saved(tmp_path).to("meta"), 3 * MB)


def test_a_model_that_is_dropped_ends_its_thread(tmp_path: Path) -> None:
    stream_weights(saved(tmp_path), 6 * MB)
    gc.collect()
    assert not any(each.name == "kvboost-weights" for each in threading.enumerate())


def test_other_systems_are_told_that_it_needs_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="on Linux only"):
        stream_weights(build("llama", WIDE), 6 * MB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group_size", [32, -1])
def test_a_packed_layer_computes_what_it_stands_for(dtype: torch.dtype, group_size: int) -> None:
    linear = torch.nn.Linear(64, 72)
    packed = quantise_awq(linear.weight.data, 64 if group_size == -1 else group_size)
    layer = AWQLinear(linear, group_size)
    for name in ("qweight", "qzeros", "scales"):
        getattr(layer, name).copy_(packed[name])
    linear.weight.data = packed["dense"]
    one_hot = torch.eye(64, dtype=dtype)
    bias = linear.bias.to(dtype)
    layer.bias = bias
    assert torch.equal(layer(one_hot), packed["dense"].t().to(dtype) + bias)
    assert layer(one_hot[None, :2]).shape == (1, 2, 72)


def test_nibbles_lie_where_the_published_layout_has_them() -> None:
    numbers = torch.arange(8)[None]
    assert [hex(word) for word in pack(numbers, COLUMN_OF_NIBBLE)[0].tolist()] == ["0x75316420"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
@pytest.mark.parametrize("budget", [None, 5 * MB])
def test_an_awq_checkpoint_gives_the_logits_of_the_dequantised_model(
    tmp_path: Path, budget: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    save(tmp_path)
    dense = save_awq(build("qwen2", WIDE).to(dtype), tmp_path, group_size=64)
    model, _ = load(str(tmp_path), None, {}, budget)
    assert model.dtype == dtype
    wanted, given = logits(dense).float(), logits(model).float()
    assert (given - wanted).norm() <= tolerance * wanted.norm()
    linears = [each for each in model.modules() if isinstance(each, AWQLinear)]
    assert len(linears) == 6 * 7
    if budget is not None:
        weights = streamed(model)
        assert weights is not None
        assert weights.stats.streamed_bytes > 0
        assert torch.equal(logits(model).float(), given)


def test_an_awq_checkpoint_is_served_with_reuse(tmp_path: Path) -> None:
    save(tmp_path)
    save_awq(build("llama", WIDE | {"eos_token_id": 999}), tmp_path, group_size=64)
    with KVBoost.from_pretrained(str(tmp_path), max_weight_bytes=6 * MB) as engine:
        cold, warm = (engine.generate(words(100), 8) for _ in range(2))
    assert cold.token_ids == warm.token_ids
    assert warm.cached_tokens == 99


@pytest.mark.parametrize("difference", [{"version": "gemv"}, {"bits": 8}, {"zero_point": False}])
def test_other_kinds_of_awq_are_refused(tmp_path: Path, difference: dict[str, object]) -> None:
    save(tmp_path)
    model = build("llama", WIDE)
    settings = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    model.config.quantization_config = settings | difference
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="expected 4 bits, 'gemm' and zero points"):
        load(str(tmp_path), None, {})
