"""Transformers' own `generate()` and scores, beside the running batch (ADR 40)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from batching import WAIT_S, alone, come_to_rest, engine_of, greedy, running
from fakes import words
from kvboost import ConfigError, KVBoost
from tiny_models import SUPPORTED, build
from waiting import at_once

NUM_NEW = 24
BEAMS = {"num_beams": 2, "max_new_tokens": NUM_NEW}


class Failing(LogitsProcessor):  # type: ignore[misc]
    """Fails at its third token."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            raise ZeroDivisionError
        return scores


def native(prompt: list[int], seed: int = 0, **arguments: Any) -> list[int]:
    """What Transformers alone generates."""
    model, ids = build(*SUPPORTED["llama"]), torch.tensor([prompt])
    mask = torch.ones_like(ids)
    torch.manual_seed(seed)
    output: list[int] = model.generate(ids, attention_mask=mask, **arguments)[0].tolist()
    return output[len(prompt) :]


def test_running_answers_go_on_beside_beams(engine: KVBoost) -> None:
    ticket = running(engine)
    before = engine.batch_stats()["num_steps"]
    result = engine.generate(words(60, seed=5), eos_token_id=None, **BEAMS)
    num_steps = engine.batch_stats()["num_steps"] - before
    assert num_steps >= NUM_NEW - 2
    assert result.token_ids == native(words(60, seed=5), eos_token_id=None, **BEAMS)
    ticket.cancel()


def test_running_answers_go_on_beside_scores(engine: KVBoost) -> None:
    ticket = running(engine)
    before = engine.batch_stats()["num_steps"]
    continuations = [words(8, seed=seed) for seed in range(12)]
    scores = engine.score(words(60, seed=5), continuations).scores
    assert engine.batch_stats()["num_steps"] - before >= len(continuations) - 1
    ticket.cancel()
    come_to_rest(engine)
    assert engine.score(words(60, seed=5), continuations).scores == scores


def test_sampling_draws_what_transformers_draws_beside_others(engine: KVBoost) -> None:
    arguments = {"do_sample": True, "top_k": 20, "max_new_tokens": NUM_NEW, "eos_token_id": None}
    expected = native(words(40, seed=6), seed=3, **arguments)
    ticket = running(engine)
    torch.manual_seed(3)
    assert engine.generate(words(40, seed=6), **arguments).token_ids == expected
    ticket.cancel()


def test_guests_take_turns_and_each_has_its_own_output(engine: KVBoost) -> None:
    prompts = [words(40 + number, seed=number) for number in range(3)]
    arguments = {"no_repeat_ngram_size": 3, "max_new_tokens": NUM_NEW, "eos_token_id": None}
    results = at_once(lambda prompt: engine.generate(prompt, **arguments), prompts)
    assert [each.token_ids for each in results] == [native(p, **arguments) for p in prompts]
    assert torch.is_grad_enabled()
    assert engine._worker.call(torch.is_grad_enabled)


def test_calls_of_several_threads_share_steps() -> None:
    prompts = [words(40 + number, seed=number) for number in range(8)]
    with engine_of(max_batch_size=8) as engine:
        results = at_once(lambda prompt: engine.generate(prompt, 64), prompts)
        assert engine.batch_stats()["mean_batch_size"] > 2
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == alone(prompt, 64)[: len(result.token_ids)]


def test_a_guest_streams_its_text_and_one_sequence_only(engine: KVBoost) -> None:
    stream = engine.stream(words(20, seed=5), 8, no_repeat_ngram_size=50, eos_token_id=None)
    pieces = list(stream)
    assert stream.result is not None and len(pieces) > 1
    assert "".join(pieces) == stream.result.output_text
    with pytest.raises(ConfigError, match="several sequences cannot be streamed"):
        list(engine.stream(words(20), 4, do_sample=True, num_return_sequences=2))


def test_a_closed_stream_ends_its_guest_and_keeps_its_prompt(engine: KVBoost) -> None:
    prompt = words(96, seed=7)
    stream = engine.stream(prompt, 100_000, no_repeat_ngram_size=50, eos_token_id=None)
    next(stream)
    stream.close()
    come_to_rest(engine)
    assert engine._parts.pool.stats()["used_blocks"] == 0
    assert engine.explain(prompt).spans[0].span.stop >= 80


def test_a_guest_that_fails_fails_alone(engine: KVBoost) -> None:
    prompt = words(30, seed=9)
    ticket = engine.submit(prompt, greedy(40))
    with pytest.raises(ZeroDivisionError):
        engine.generate(words(40, seed=8), logits_processor=LogitsProcessorList([Failing()]))
    assert list(ticket.result(WAIT_S).token_ids) == alone(prompt, 40)
    come_to_rest(engine)


def test_a_long_prompt_of_a_guest_is_prefilled_in_pieces(engine: KVBoost) -> None:
    ticket = running(engine)
    before = engine.batch_stats()["num_steps"]
    engine.generate(words(900, seed=4), num_beams=2, max_new_tokens=1)
    assert engine.batch_stats()["num_steps"] - before >= 3
    ticket.cancel()
