"""The engine's calls on a tiny random model: same answers with and without reuse, come what may."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from batching import alone, engine_of, greedy
from fakes import WordTokenizer, byte_tokenizer, words
from kvboost import ConfigError, GenerationMode, KVBoost, KVBoostError, TextStream, UnsupportedModel
from kvboost.core import MatchKind, Span
from kvboost.models.rows import Rows
from tiny_models import REFUSED, SUPPORTED, build
from waiting import at_once

pytestmark = pytest.mark.tiny

HEALING = GenerationConfig(max_new_tokens=2, token_healing=True)


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with engine_of() as made:
        yield made


def plain(tokens: list[int], num_new: int, name: str = "llama", **arguments: object) -> list[int]:
    """What Transformers alone answers."""
    ids = torch.tensor([tokens])
    settings = {"max_new_tokens": num_new, "do_sample": False} | arguments
    output = build(*SUPPORTED[name]).generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return output[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2-softcap", "deepseek_v3-mla"])
def test_cold_warm_and_plain_answers_are_the_same(name: str) -> None:
    engine, shared = engine_of(name), words(70)
    for turn, num_shared in enumerate((0, 70, 33, 70, 17)):
        prompt = shared[:num_shared] + words(20, seed=turn + 1)
        cold = engine.generate(prompt, 12, reuse="off")
        warm = engine.generate(prompt, 12)
        assert cold.token_ids == warm.token_ids == plain(prompt, 12, name)
        assert warm.cached_tokens == (num_shared if turn > 1 else 0)


@pytest.mark.parametrize("name", ["qwen2", "gemma3-two-rotations"])
def test_prompt_lookup_gives_the_greedy_text_cold_and_warm(name: str) -> None:
    prompt = words(20) * 3
    with engine_of(name) as engine:
        for cached in (0, len(prompt) - 1):
            result = engine.generate(prompt, 12, prompt_lookup_num_tokens=3)
            assert (result.token_ids, result.cached_tokens) == (plain(prompt, 12, name), cached)


def test_a_result_says_what_was_reused_and_what_it_cost(engine: KVBoost) -> None:
    prompt = words(50)
    engine.generate([*prompt[:40], 7], 2)
    started = time.perf_counter()
    result = engine.generate(" ".join(map(str, prompt)), 5)
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    assert (result.prompt_tokens, result.cached_tokens, result.kv_reuse_ratio) == (50, 40, 0.8)
    assert [(r.span, r.kind) for r in result.reuse.spans] == [
        (Span(0, 40), MatchKind.EXACT),  # chunks that were computed together are one span
        (Span(40, 50), MatchKind.MISS),
    ]
    assert 0 < result.reuse.lookup_ms + result.reuse.load_ms < result.ttft_ms
    assert result.ttft_ms < result.total_ms < elapsed_ms
    assert sum(result.stages_ms.values()) == pytest.approx(result.total_ms)
    assert result.total_ms - result.stages_ms["decode"] == pytest.approx(result.ttft_ms)
    assert min(result.stages_ms.values()) >= 0
    assert result.output_text == WordTokenizer().decode(result.token_ids)
    assert result.tokens_per_sec == pytest.approx(5 / (result.total_ms / 1e3))


def test_what_was_generated_is_reused_too(engine: KVBoost) -> None:
    prompt = words(40)
    first = engine.generate(prompt, 20)
    follow_up = prompt + first.token_ids + words(10, seed=2)
    second = engine.generate(follow_up, 8)
    assert second.cached_tokens == 59  # the last generated token was never computed
    assert second.token_ids == plain(follow_up, 8)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"prompt_lookup_num_tokens": 3},
        {"bad_words_ids": [[10], [20, 30]], "min_new_tokens": 5},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [11, 12, 13]},
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False)},
        {"tokenizer": WordTokenizer(), "return_dict_in_generate": False},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_generation_arguments_work_as_in_transformers(engine: KVBoost, arguments: dict) -> None:
    prompt = words(20) * 3
    engine.generate([*prompt[:45], 9], 1)
    num_new = None if "generation_config" in arguments else 10
    ours = engine.generate(prompt, num_new, **arguments)
    assert ours.cached_tokens == 45
    settings = {} if num_new is None else {"max_new_tokens": num_new}
    ids = torch.tensor([prompt])
    native = build(*SUPPORTED["llama"]).generate(
        ids, attention_mask=torch.ones_like(ids), **{"do_sample": False} | settings | arguments
    )
    assert ours.output.sequences.tolist() == native.tolist()
    assert len(ours.output_texts) == len(native)


def test_sampling_with_a_seed_gives_the_same_text_cold_and_warm(engine: KVBoost) -> None:
    prompt, texts = words(60), []
    for _ in range(3):
        torch.manual_seed(5)
        answer = engine.generate(
            prompt, 12, do_sample=True, temperature=0.8, num_return_sequences=2
        )
        texts.append(answer.output_texts)
    assert answer.cached_tokens == 59
    assert texts[0] == texts[1] == texts[2] and texts[0][0] != texts[0][1]


def test_beams_do_not_spoil_the_store(engine: KVBoost) -> None:
    prompt = words(60)
    best = engine.generate(prompt, 10, num_beams=4)
    follow_up = prompt + best.token_ids + words(5, seed=3)
    again = engine.generate(follow_up, 10)
    assert again.cached_tokens == 59 and again.token_ids == plain(follow_up, 10)


def test_a_batch_answers_each_prompt_with_its_own_settings(engine: KVBoost) -> None:
    shared = words(200)
    prompts = [shared + words(3 + turn, seed=turn) for turn in range(3)]
    results = engine.generate_batch(prompts, 6, per_prompt=[{}, {"max_new_tokens": 2}, {}])
    assert [len(r.token_ids) for r in results] == [6, 2, 6]
    assert [r.cached_tokens for r in results] == [0, 200, 200]
    assert [r.token_ids for r in results] == [
        plain(p, 6)[: len(r.token_ids)] for p, r in zip(prompts, results, strict=True)
    ]
    with pytest.raises(ConfigError, match="2 entries for 3 prompts"):
        engine.generate_batch(prompts, per_prompt=[{}, {}])
    with pytest.raises(ConfigError, match="a list of prompts"):
        engine.generate_batch("a text")


def test_a_stream_yields_the_answer_piece_by_piece(engine: KVBoost) -> None:
    prompt = words(30)
    expected = engine.generate(prompt, 10, reuse="off").output_text
    stream = engine.stream(prompt, 10)
    pieces = list(stream)
    assert "".join(pieces) == expected and len(pieces) > 3
    assert stream.result is not None and stream.result.output_text == expected
    assert list(stream) == []

    async def read() -> list[str]:
        return [piece async for piece in engine.astream(prompt, 10)]

    assert "".join(asyncio.run(read())) == expected


def test_a_closed_or_dropped_stream_stops_generating(engine: KVBoost) -> None:
    with engine.stream(words(30), 3000) as stream:
        next(stream)
    dropped = engine.stream(words(30), 3000)
    next(dropped)
    del dropped
    gc.collect()
    assert len(engine.generate(words(10), 3).token_ids) == 3  # not stuck behind 3000 tokens
    engine.flush()
    assert engine.cache_stats()["hot_chunks"] < 100


def test_an_error_in_a_stream_reaches_its_reader(engine: KVBoost) -> None:
    stream = engine.stream(words(30), 10, no_such_argument=1)
    with pytest.raises(ValueError, match="no_such_argument"):
        next(stream)
    assert list(stream) == []
    assert engine.generate(words(10), 3).token_ids


def test_chat_history_is_found_again(engine: KVBoost) -> None:
    messages = [{"role": "user", "content": " ".join(map(str, words(30)))}]
    first = engine.chat(messages, 8)
    messages += [
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "70 71"},
    ]
    second = engine.chat(messages, 8)
    assert second.cached_tokens == 32  # the fake template opens the answer with a token of its own
    assert second.token_ids == engine.chat(messages, 8, reuse="off").token_ids


def test_a_chat_streams_what_it_would_return(engine: KVBoost) -> None:
    messages = [{"role": "user", "content": " ".join(map(str, words(30)))}]
    expected = engine.chat(messages, 8)
    with engine.chat(messages, 8, stream=True) as stream:
        pieces = list(stream)
    assert isinstance(stream, TextStream) and len(pieces) > 3
    assert "".join(pieces) == expected.output_text
    assert stream.result is not None and stream.result.prompt_tokens == expected.prompt_tokens

    async def read() -> list[str]:
        return [piece async for piece in engine.achat(messages, 8)]

    assert "".join(asyncio.run(read())) == expected.output_text


def test_a_prompt_of_another_type_is_refused_with_the_call_to_use(engine: KVBoost) -> None:
    def calls(prompt: object) -> list[Callable[[], object]]:
        return [
            lambda: engine.generate(prompt),
            lambda: engine.stream(prompt),
            lambda: engine.astream(prompt),
            lambda: engine.submit(prompt),
            lambda: engine.generate_batch([prompt]),
            lambda: engine.explain(prompt),
            lambda: engine.score(prompt, ["1"]),
            lambda: engine.verify_correctness([prompt]),
        ]

    for call in calls([{"role": "user", "content": "1 2"}]):
        with pytest.raises(TypeError, match=r"a list of messages: call chat\(messages\)"):
            call()
    for call in calls(["1 2", "3"]):
        with pytest.raises(TypeError, match=r"call generate_batch\(prompts\)"):
            call()
    for call in calls(b"1 2"):
        with pytest.raises(TypeError, match="is a bytes: expected text or token ids"):
            call()


def test_a_result_says_why_it_ended(engine: KVBoost) -> None:
    prompt = words(30)
    whole = engine.generate(prompt, 8)
    fourth = whole.token_ids[3]
    num = whole.token_ids.index(fourth) + 1
    assert whole.finish_reason == "length"
    ended = engine.generate(prompt, 8, eos_token_id=fourth)
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", num)
    at_limit = engine.generate(prompt, num, eos_token_id=fourth)
    assert (at_limit.finish_reason, len(at_limit.token_ids)) == ("stop", num)
    assert engine.generate(prompt, 8, stopping_criteria=[_after_two]).finish_reason == "stop"
    assert engine.generate_batch([prompt], 8)[0].finish_reason == "length"


def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    tokenizer, prompt = byte_tokenizer(), words(30)
    model = build(*SUPPORTED["llama"])
    model.generation_config.suppress_tokens = [*range(256, 512)]  # the answer is of single bytes
    with KVBoost(model, tokenizer) as engine:
        answer = engine.generate(prompt, 24)
        place, stop = next((i, c) for i, c in enumerate(answer.output_text) if c.isascii())
        num_tokens = len(tokenizer(answer.output_text[: place + 1]).input_ids)
        ended = engine.generate(prompt, num_tokens, stop_strings=[stop])
    assert (answer.finish_reason, ended.finish_reason) == ("length", "stop")


def _after_two(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
    return torch.full(ids.shape[:1], ids.shape[1] >= 32)


def test_a_temperature_samples_without_do_sample(engine: KVBoost) -> None:
    prompt = words(30)
    greedy = engine.generate(prompt, 12)
    assert engine.generate(prompt, 12, temperature=0).token_ids == greedy.token_ids
    for given in ({"temperature": 5.0}, {"top_p": 0.9}, {"top_k": 40}):
        torch.manual_seed(1)
        sampled = engine.generate(prompt, 12, **given)
        torch.manual_seed(1)
        assert sampled.token_ids == engine.generate(prompt, 12, do_sample=True, **given).token_ids
        assert sampled.token_ids != greedy.token_ids
    with pytest.raises(ConfigError, match=r"do_sample=False and temperature=0\.7, which samples"):
        engine.generate(prompt, 12, do_sample=False, temperature=0.7)
    with pytest.raises(ConfigError, match="do_sample=True and temperature=0, which is greedy"):
        engine.generate_batch([prompt], 12, do_sample=True, temperature=0)


def test_reuse_of_quantised_kv_is_not_called_exact() -> None:
    prompt = words(50)
    with engine_of(kv_cache_bits=8) as engine:
        engine.generate(prompt, 2)
        reports = [engine.generate(prompt, 2).reuse, engine.explain(prompt)]
    for report in reports:
        assert str(report).startswith("49 tokens reused from 8-bit K/V, 0 moved")
        assert "exact" not in str(report)
        assert report.spans[0].reason == "from 8-bit K/V: approximate"


def test_warm_takes_texts_messages_and_ids_and_can_pin(engine: KVBoost) -> None:
    text = " ".join(map(str, words(40)))
    assert engine.warm(text).num_computed == 40
    assert engine.warm([text, text], pin=True).num_pinned == 3
    several = engine.warm([text, " ".join(map(str, words(20, seed=1)))])
    assert (several.num_texts, several.num_tokens, several.num_computed) == (2, 60, 21)
    chat = engine.warm([{"role": "user", "content": text}], ttl_s=3, pin=True)
    assert (chat.num_texts, chat.num_computed) == (1, 42)
    assert engine.warm(words(20, seed=9)).num_computed == 20
    assert engine.generate([*words(40), 7], 2).cached_tokens == 40
    with pytest.raises(ConfigError, match="position_offset=3"):
        engine.warm(text, 3)
    with pytest.raises(ConfigError, match="requires pin=True"):
        engine.warm(text, ttl_s=3)


def test_nothing_of_no_text_is_pinned(engine: KVBoost) -> None:
    assert engine.contents.pin([], tenant="", ttl_s=None) == 0


def test_pinned_text_outlives_traffic() -> None:
    geometry = engine_of()._parts.model.geometry
    engine = engine_of(max_cache_bytes=20 * 16 * geometry.bytes_per_token)
    engine.warm(words(64), pin=True)
    for turn in range(1, 12):
        engine.generate(words(100, seed=turn), 4)
    engine.flush()
    stats = engine.cache_stats()
    assert stats["hot_memory_mb"] <= stats["budget_mb"] and stats["evicted_chunks"] > 0
    assert engine.generate([*words(64), 7], 2).cached_tokens == 64


def test_tenants_and_models_do_not_meet(engine: KVBoost) -> None:
    prompt = words(40)
    engine.generate(prompt, 2, tenant="a")
    assert engine.generate(prompt, 2, tenant="b").cached_tokens == 0
    assert engine.generate(prompt, 2, tenant="a").cached_tokens == 39
    models = [build(*SUPPORTED["llama"], seed=seed) for seed in (0, 0, 1)]
    prints = {KVBoost(each, WordTokenizer())._parts.model.fingerprint for each in models}
    assert len(prints) == 2
    other = build("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}})
    assert KVBoost(other, WordTokenizer())._parts.model.fingerprint not in prints


def test_ids_that_the_model_lacks_reach_no_forward(engine: KVBoost) -> None:
    """On a GPU one of them would end the process."""
    bad = [5, 6, 512]
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(bad, 2),
        "stream": lambda: engine.stream(bad, 2),
        "submit": lambda: engine.submit(bad),
        "generate_batch": lambda: engine.generate_batch([words(5), bad], 2),
        "explain": lambda: engine.explain(bad),
        "warm": lambda: engine.warm(bad),
        "score": lambda: engine.score(bad, [words(2)]),
        "verify_correctness": lambda: engine.verify_correctness([bad], 2),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=r"token 2 of .* is 512: the model knows 0 to 511"):
            call()
            pytest.fail(name)
    with pytest.raises(ConfigError, match=r"token 1 of continuations\[1\] is -1"):
        engine.score(words(5), [words(2), [3, -1]])


@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_bits_are_promised_only_where_the_same_computes(
    tmp_path: Path, deterministic: bool
) -> None:
    """Another number of threads stands for all that changes the last bits."""
    options = {"deterministic": deterministic, "piece_tokens": 32, "disk_cache_dir": str(tmp_path)}
    before, cached = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 2):
            torch.set_num_threads(num_threads)
            with engine_of(**options) as engine:
                cached.append(engine.generate(words(80), 2).cached_tokens)
    finally:
        torch.set_num_threads(before)
    assert cached == ([0, 0, 64] if deterministic else [0, 79, 79])


def test_verify_is_true_only_if_reuse_was_right(engine: KVBoost) -> None:
    report = engine.verify_correctness([words(60), words(80, seed=1)], max_new_tokens=8)
    assert report and "2 of 2 answers the same" in str(report)
    engine.flush()
    for chunk in engine._parts.store.tiers.memory._chunks.values():
        for plane in chunk.kv():
            plane.zero_()
    spoiled = engine.verify_correctness([words(60)], max_new_tokens=8)
    assert not spoiled and "NOT CORRECT" in str(spoiled)
    assert spoiled.checks[0].max_kl > 1e-3


def test_deterministic_prefill_is_bitwise_and_reuses_whole_pieces() -> None:
    engine = engine_of(deterministic=True, piece_tokens=32)
    prompt = words(100)
    cold = engine.generate(prompt, 12, reuse="off", output_logits=True)
    engine.generate(prompt[:90] + words(40, seed=3), 4, num_beams=2)
    warm = engine.generate(prompt, 12, output_logits=True)
    assert warm.cached_tokens == 64
    for a, b in zip(cold.output.logits, warm.output.logits, strict=True):
        assert torch.equal(a, b)
    assert engine.generate([*prompt[:96], 7], 2).cached_tokens == 96
    assert engine.verify_correctness([prompt]).tolerance_kl == 0
    assert engine.verify_correctness([prompt])


def test_speculation_does_not_spoil_deterministic_pieces() -> None:
    engine = engine_of(deterministic=True, piece_tokens=32)
    prompt = words(16) * 4  # ends on the border of a piece, and repeats: candidates from the start
    engine.generate(prompt, 8, prompt_lookup_num_tokens=4)
    longer = prompt + words(20, seed=1)
    cold = engine.generate(longer, 6, reuse="off", output_logits=True).output.logits
    engine.generate(longer, 6)
    warm = engine.generate(longer, 6, output_logits=True)
    assert warm.cached_tokens == 64
    assert all(torch.equal(a, b) for a, b in zip(cold, warm.output.logits, strict=True))


def test_deterministic_bits_do_not_depend_on_where_blocks_are_free() -> None:
    prompt = words(100)
    with engine_of(deterministic=True, piece_tokens=32) as engine:
        together = engine.generate(prompt, 6, reuse="off", output_logits=True).output.logits
        pool = engine._parts.pool
        blocks = pool.take(pool.num_free)
        pool.release(blocks[::2])
        apart = engine.generate(prompt, 6, reuse="off", output_logits=True).output.logits
        pool.release(blocks[1::2])
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_speculation_has_room_for_candidates_beyond_the_limit() -> None:
    prompt = words(8) * 6
    with engine_of() as engine:
        pool = engine._parts.pool
        blocks = pool.take(pool.num_free)  # so its rows have a fixed capacity
        result = engine.generate(prompt, 3, prompt_lookup_num_tokens=20)
        pool.release(blocks)
    assert result.token_ids == plain(prompt, 3)


def test_rows_that_are_not_filled_yet_do_not_reach_the_answer(engine: KVBoost) -> None:
    model, prompt = engine._parts.model, words(40)

    def compute(garbage: float) -> torch.Tensor:
        rows = Rows(engine._parts.pool, 40)
        model.forward(rows, prompt[:20], range(20))
        for planes in engine._parts.pool.layers.values():
            for plane in planes:
                plane.index_fill_(2, torch.as_tensor(rows.slot_mapping(20, 40)), garbage)
        rows.length = 40
        logits = model.forward(rows, [prompt[n] for n in (3, 9, 17)], [3, 9, 17])
        assert rows.length == 40
        rows.release()
        return logits

    assert torch.equal(
        engine._worker.call(lambda: compute(0.0)), engine._worker.call(lambda: compute(torch.nan))
    )


def test_a_models_own_cache_implementation_keeps_it_in_the_batch(engine: KVBoost) -> None:
    engine._parts.model.model.generation_config.cache_implementation = "hybrid"
    assert engine._parts.model.special_settings() == set()


def test_warmed_text_is_stored_in_place_of_text_in_use() -> None:
    geometry = engine_of()._parts.model.geometry
    with engine_of(max_cache_bytes=20 * 16 * geometry.bytes_per_token) as engine:
        for _ in range(4):
            for seed in range(1, 5):
                engine.generate(words(72, seed=seed), 1)
        engine.warm(words(160))
        assert engine.explain([*words(160), 7]).tokens(MatchKind.EXACT) == 160


def test_what_is_reused_is_not_evicted_for_its_own_request() -> None:
    options = {"num_blocks": 40, "reuse": "auto", "promote": False}
    with engine_of(**options) as engine:
        engine._parts.cost.pays = lambda *_: True
        engine.generate(words(96), 1)
        for _ in range(3):
            for seed in range(1, 5):
                engine.generate(words(90, seed=seed), 1)
        for num_before in (40, 100, 150):
            prompt = [*words(num_before, seed=10 + num_before), *words(96), 9]
            assert engine.generate(prompt, 1).reuse.tokens(MatchKind.MOVED) == 96


def test_cache_implementation_of_a_config_does_not_get_in_the_way(engine: KVBoost) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert engine.generate(words(30), generation_config=config).token_ids == plain(words(30), 5)


def test_boundary_window_ends_chunks_at_lines() -> None:
    class Sentences(WordTokenizer):
        def batch_decode(self, sequences: list[list[int]], **_: object) -> list[str]:
            return [f"{tokens[0]}." if tokens[0] % 10 == 0 else "-" for tokens in sequences]

    model = build(*SUPPORTED["llama"])
    engine = KVBoost(model, Sentences(), chunk_size=16, chunk_boundary_window=8)
    prompt = words(60)
    engine.warm(prompt)
    stored = engine._parts.store.index._tokens  # in the order of the prompt
    lengths = [len(tokens) // 4 for tokens in stored]
    stops = [sum(lengths[: count + 1]) for count in range(len(lengths))]
    assert sum(lengths) == 60
    assert any(length < 16 for length in lengths[:-1])
    cuts = list(zip(stops, lengths, strict=True))[:-1]
    assert all(prompt[stop - 1] % 10 == 0 or length == 16 for stop, length in cuts)


def test_what_grows_past_the_rope_limit_is_not_stored_nor_reused() -> None:
    engine, long = engine_of("phi3-longrope"), words(100) + words(950, seed=1)
    assert engine.warm(long).num_computed == 0
    assert engine.generate(words(100), 4).cached_tokens == 0
    result = engine.generate(long, 4)
    assert result.cached_tokens == 0 and "beyond 1024 positions" in result.reuse.note
    assert result.token_ids == plain(long, 4, "phi3-longrope")
    assert engine.generate([*words(100), 7], 4).cached_tokens == 100


def test_deterministic_prefill_past_the_rope_limit_is_the_models_own() -> None:
    engine = engine_of("phi3-longrope", deterministic=True, piece_tokens=256)
    assert engine.generate(words(1100), 6).token_ids == plain(words(1100), 6, "phi3-longrope")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_run_without_reuse_if_asked(name: str) -> None:
    model_type, differences, reason = REFUSED[name]
    model = build(model_type, differences)
    with pytest.raises(UnsupportedModel):
        KVBoost(model, WordTokenizer())
    with KVBoost(model, WordTokenizer(), strict=False) as engine:
        result = engine.generate(words(20), 4)
        assert len(result.token_ids) == 4 and reason in result.reuse.note
        assert engine.warm(words(20), pin=True).num_computed == 0
        assert engine.cache_stats()["requests"] == 1
        with pytest.raises(UnsupportedModel, match=reason):
            engine.verify_correctness()


def test_an_unforeseen_refusal_shows_where_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", {})

    def fail(*_: object) -> None:
        raise KeyError(4)

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with KVBoost(model, WordTokenizer(), strict=False) as engine:
        assert engine._parts.model.refusal.endswith("KeyError: 4")
    (record,) = [each for each in caplog.records if "no reuse for" in each.message]
    assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_a_model_has_one_engine_and_gets_its_state_back() -> None:
    model = build(*SUPPORTED["gemma2-softcap"]).train()
    with KVBoost(model, WordTokenizer()), pytest.raises(UnsupportedModel, match="close that one"):
        KVBoost(model, WordTokenizer())
    assert model.training
    with KVBoost(model, WordTokenizer()) as engine:
        assert engine.generate(words(20), 2).token_ids


def test_closing_twice_does_nothing_to_the_next_engine() -> None:
    model = build(*SUPPORTED["llama"])
    first = KVBoost(model, WordTokenizer())
    first.close()
    with KVBoost(model, WordTokenizer()) as second:
        first.close()
        submitted = [second.submit(words(40), greedy(8)) for _ in range(3)]
        assert all(list(each.result(60).token_ids) == alone(words(40), 8) for each in submitted)
        with pytest.raises(UnsupportedModel, match="close that one"):
            KVBoost(model, WordTokenizer())


def test_calling_the_engine_from_inside_a_request_is_an_error_not_a_deadlock(
    engine: KVBoost,
) -> None:
    def ask(batch: int, ids: torch.Tensor) -> list[int]:
        engine.generate([1, 2], 1)
        return [5]

    def close(batch: int, ids: torch.Tensor) -> list[int]:
        engine.close()
        return [5]

    def warm(batch: int, ids: torch.Tensor) -> list[int]:
        with engine._warming._turn:  # another thread's call, which waits for the engine
            engine.warm([1, 2])
        return [5]

    for call in (ask, close, warm):
        with pytest.raises(KVBoostError, match="wait for itself"):
            engine.generate(words(20), 2, prefix_allowed_tokens_fn=call)
    assert engine.generate(words(20), 2).token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1], "past_key_values": None}, "brings its own cache"),
        ({"prompt": [1], "token_healing": True}, "changes the prompt"),
        ({"prompt": [1], "generation_config": HEALING}, "changes the prompt"),
        ({"prompt": [1], "position_ids": None}, "positions of its tokens"),
        ({"prompt": [1], "reuse": "off", "mode": GenerationMode.BASELINE}, "give one"),
        ({"prompt": [1], "chunk_size": 3}, "not of a request"),
        ({"prompt": [1], "reuse": "some"}, "off, exact, auto"),
    ],
)
def test_wrong_requests_are_explained(engine: KVBoost, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.generate(**arguments)


def test_modes_of_the_original_package(engine: KVBoost) -> None:
    prompt = words(40)
    engine.generate(prompt, 2, mode=GenerationMode.PREFIX_CACHE)
    assert engine.generate(prompt, 2, mode=GenerationMode.BASELINE).cached_tokens == 0
    assert engine.generate(prompt, 2, mode=GenerationMode.CHUNK_KV_REUSE).cached_tokens == 39


def test_threads_get_the_answers_they_would_get_alone(engine: KVBoost) -> None:
    shared = words(50)
    prompts = [shared[: 10 * (turn % 6)] + words(15, seed=turn) for turn in range(12)]
    alone = [plain(prompt, 6) for prompt in prompts]

    def work(seed: int) -> None:
        for turn in random.Random(seed).sample(range(12), 12):
            call = engine.generate if turn % 3 else engine.stream
            answer = call(prompts[turn], 6)
            text = answer.output_text if turn % 3 else "".join(answer)
            assert text == WordTokenizer().decode(alone[turn])

    at_once(work, range(8))


def test_from_pretrained_and_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(*SUPPORTED["qwen2"]).save_pretrained(tmp_path)
    monkeypatch.setattr(
        "kvboost.models.load.AutoTokenizer.from_pretrained", lambda *a, **k: WordTokenizer()
    )
    engine = KVBoost.from_pretrained(
        str(tmp_path), dtype=torch.bfloat16, device="cpu", chunk_size=16
    )
    assert engine._parts.model.geometry.dtype == "bfloat16"
    assert engine.generate(words(20), 2).token_ids
    model = engine._parts.model.model
    engine.close()
    untouched = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert model.config._attn_implementation == untouched.config._attn_implementation
    ids = torch.tensor([words(30)])
    assert torch.equal(model(ids).logits, untouched(ids).logits)


def test_stats_tell_tenants_apart(engine: KVBoost) -> None:
    engine.warm(words(32), tenant="warmed")
    for tenant in ("a", "a", "b"):
        engine.generate(words(40), 2, tenant=tenant)
    engine.flush()
    stats = engine.cache_stats()
    tenants = stats["tenants"]
    assert [tenants[name]["requests"] for name in ("a", "b", "warmed")] == [2, 1, 0]
    assert tenants["a"]["cache_hits"] > 0 == tenants["b"]["cache_hits"]
    assert tenants["a"]["exact_tokens"] == 39
    assert tenants["a"]["cache_misses"] == tenants["b"]["cache_misses"] > 0
    held_bytes = sum(row["memory_bytes"] for row in tenants.values())
    assert held_bytes == stats["hot_memory_mb"] * 2**20 > 0
    assert tenants["warmed"]["memory_bytes"] > 0
