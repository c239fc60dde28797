"""Several sequences in one row of a forward: each gets what it would get alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from certified import tiny_model
from fakes import WordTokenizer
from kvboost import KVBoost
from kvboost.core import Span
from kvboost.models.hf import HFModel
from kvboost.models.packed import Segment
from kvboost.models.pool import BlockPool
from kvboost.models.rows import Rows, private_rows
from tiny_models import SUPPORTED, VOCABULARY, build

pytestmark = pytest.mark.tiny

TOLERANCE = 1e-5
NUM_ALIKE = 40


def sequence(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()


FIRST = sequence(1, 96)
SECOND = FIRST[:NUM_ALIKE] + sequence(2, 35)
THIRD = FIRST[:NUM_ALIKE] + sequence(3, 70)
APART = sequence(4, 80)
SCATTERED = [*range(0, 80, 3), *(place for place in range(80) if place % 3)]


@torch.no_grad()
def native_logits(name: str, tokens: list[int]) -> torch.Tensor:
    model = build(*SUPPORTED[name])
    cache = DynamicCache(config=model.config)
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0]
    return logits


def pool_of(model: HFModel, memory: str) -> BlockPool:
    pool = BlockPool(model.geometry, 800, 7, model.model.device)
    if memory == "pieces":  # no two free blocks follow one another
        pool.hold(np.arange(0, 800, 2))
    return pool


MEMORIES = ("blocks", "pieces")
KINDS_OF_ATTENTION = ("llama", "gemma3-two-rotations", "gpt_oss-sinks", "mistral-sliding")


def in_memory(names: set[str]) -> list[tuple[str, str]]:
    """Where rows lie is no business of a model: kinds of attention on all, others on one each."""
    pairs = []
    for number, name in enumerate(sorted(names)):
        is_kind = name in KINDS_OF_ATTENTION
        pairs += [(name, each) for each in (MEMORIES if is_kind else (MEMORIES[number % 2],))]
    return pairs


@pytest.fixture(autouse=True)
def share_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.models.packed.LEAST_SHARED", 32)


class Packed:
    """Sequences of one model; each step checks the logits of all that took part."""

    def __init__(self, name: str, memory: str) -> None:
        self.name = name
        self.model = tiny_model(name)
        self.pool = pool_of(self.model, memory)
        self.native: dict[int, torch.Tensor] = {}

    def step(self, *parts: tuple[list[int], Rows, range | list[int]]) -> None:
        segments = [
            Segment(rows, [tokens[place] for place in places], places)
            for tokens, rows, places in parts
        ]
        logits = self.model.forward_packed(segments)
        for segment, (tokens, _, places) in zip(segments, parts, strict=True):
            if id(tokens) not in self.native:
                self.native[id(tokens)] = native_logits(self.name, tokens)
            wanted = self.native[id(tokens)][places[-1]]
            assert float((logits[segment] - wanted).abs().max()) <= TOLERANCE


# They change K/V between cache and attention, or read K/V of another layer.
ONE_BY_ONE = {"deepseek_v3-mla", "diffllama", "gemma3n-shared-kv", "minicpm3-mla"}


def test_models_that_cannot_be_packed_are_found_out() -> None:
    packing = {name: tiny_model(name).packs for name in SUPPORTED}
    assert {name for name, packs in packing.items() if not packs} == ONE_BY_ONE


def test_the_reason_is_logged_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    with KVBoost(build(*SUPPORTED["diffllama"]), WordTokenizer()) as engine:
        reason = engine.batch_stats()["pack_refusal"]
    assert "logits of packed sequences are off" in reason and reason in caplog.text
    with KVBoost(build(*SUPPORTED["minicpm3-mla"]), WordTokenizer()) as engine:
        assert "RuntimeError" in engine.batch_stats()["pack_refusal"]
    with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer()) as engine:
        assert engine.batch_stats()["pack_refusal"] == ""


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", sorted(ONE_BY_ONE))
def test_where_rows_cannot_be_packed_a_step_takes_one_forward_each(name: str, memory: str) -> None:
    packed = Packed(name, memory)
    first, apart = (Rows(packed.pool, 8) for _ in range(2))
    packed.step((FIRST, first, range(50)), (APART, apart, SCATTERED))
    packed.step((FIRST, first, range(50, 51)))


def test_private_rows_with_the_same_numbers_are_not_taken_for_shared_ones() -> None:
    packed = Packed("llama", "blocks")
    owner = Rows(packed.pool, 60)
    packed.step((FIRST, owner, range(50)))
    shared = Rows(packed.pool, 60, owner.runs(Span(0, NUM_ALIKE)))
    private = [private_rows(packed.model.geometry, 60, packed.pool.device) for _ in range(2)]
    packed.step((APART, private[0], range(50)), (THIRD, private[1], range(50)))
    packed.step(
        (SECOND, shared, range(NUM_ALIKE, NUM_ALIKE + 1)),
        (APART, private[0], range(50, 51)),
        (THIRD, private[1], range(50, 51)),
    )


@pytest.mark.parametrize(("name", "memory"), in_memory(set(SUPPORTED) - ONE_BY_ONE))
def test_sequences_in_one_row_are_as_alone(name: str, memory: str) -> None:
    packed = Packed(name, memory)
    first, apart = (Rows(packed.pool, 8) for _ in range(2))
    packed.step((FIRST, first, range(50)), (APART, apart, SCATTERED))
    second, third = (Rows(packed.pool, 44, first.runs(Span(0, NUM_ALIKE))) for _ in range(2))
    packed.step(
        (FIRST, first, range(50, 51)),
        (SECOND, second, range(NUM_ALIKE, 60)),
        (THIRD, third, range(NUM_ALIKE, NUM_ALIKE + 1)),
    )
    packed.step(
        (THIRD, third, range(NUM_ALIKE + 1, 110)),
        (FIRST, first, range(51, 90)),
        (SECOND, second, range(60, 74)),
    )
    packed.step((FIRST, first, range(90, 91)), (SECOND, second, range(74, 75)))


@pytest.mark.parametrize("memory", ["blocks", "pieces"])
def test_requests_with_few_rows_of_their_own_are_computed_together(memory: str) -> None:
    packed = Packed("llama", memory)
    prompts = [FIRST[:NUM_ALIKE] + sequence(seed, 300) for seed in range(10, 16)]
    first = Rows(packed.pool, 8)
    packed.step((prompts[0], first, range(NUM_ALIKE + 3)))
    shared = first.runs(Span(0, NUM_ALIKE))
    rows = [first]
    rows += [Rows(packed.pool, NUM_ALIKE + 4, shared) for _ in prompts[1:]]
    for number in range(1, 6):
        packed.step((prompts[number], rows[number], range(NUM_ALIKE, NUM_ALIKE + 2 * number)))
    for step in range(330):
        if step == 100:
            rows[2].release()
            rows[2] = Rows(packed.pool, NUM_ALIKE + 4, shared)  # another in its stead
            packed.step((prompts[2], rows[2], range(NUM_ALIKE, NUM_ALIKE + 7)))
        taking = [n for n in range(6) if step % 7 != n and rows[n].length < 339]
        packed.step(
            *((prompts[n], rows[n], range(rows[n].length, rows[n].length + 1)) for n in taking)
        )
    next_ones = [Segment(each, [5], range(each.length, each.length + 1)) for each in rows]
    stayed = [each.is_small for each in next_ones]
    assert stayed == [False, False, True, False, False, False], "the others have grown"
