"""Moved text on trained weights: found, cheap, and near enough."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch

from kvboost import KVBoost
from kvboost.core import MatchKind
from kvboost.engine.prefill import Terms
from kvboost.engine.verify import answer_logits, compare
from kvboost.reuse.repair import NoRepair, SampledRepair

pytestmark = pytest.mark.model

PAGES = [page[:800] for page in sorted(topics.values(), key=len)[-10:]]


@pytest.fixture(scope="module")
def engine(smol: str) -> Iterator[KVBoost]:
    with KVBoost.from_pretrained(smol, dtype=torch.float32, reuse="auto", audit_ratio=0) as made:
        made._parts.cost.pays = lambda *_: True  # what pays depends on how busy the machine is
        made.generate(prompt(range(5), 0), 1)
        made.generate(prompt(range(5, 10), 1), 1)
        made.flush()
        yield made


def prompt(order: range | list[int], number: int) -> str:
    listed = "\n\n".join(f"Page {place}:\n{PAGES[i]}" for place, i in enumerate(order))
    return f"Read these pages. ({number})\n\n{listed}\n\nWhat is page {number % 3} about?\nAnswer:"


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(10), 4)


def test_pages_are_found_in_any_order(engine: KVBoost) -> None:
    for seed in range(4):
        text = prompt(shuffled(seed), seed)
        report = engine.explain(text)
        num_tokens = len(engine.tokenizer(text).input_ids)
        found = report.tokens(MatchKind.MOVED) + report.tokens(MatchKind.EXACT)
        assert found >= 0.93 * num_tokens  # the question and the page numbers are new


def test_repair_brings_answers_nearer_and_everything_brings_them_home(engine: KVBoost) -> None:
    parts, kls = engine._parts, {"none": [], "sampled": [], "all": []}
    repairs = {0.0: NoRepair(), 0.15: SampledRepair(0.15, 16), 1.0: SampledRepair(1.0, 16)}
    for seed in range(2):
        tokens = engine.tokenizer(prompt(shuffled(seed), seed)).input_ids
        answer = engine.generate(tokens, 12, reuse="off").token_ids
        fresh, _ = answer_logits(tokens, answer, parts, Terms("off"))
        for name, ratio in zip(kls, repairs, strict=True):
            own = replace(parts, repairs=repairs)
            moved, plan = answer_logits(tokens, answer, own, Terms("auto", "", ratio))
            assert plan.num_reused > 0.9 * len(tokens)
            kls[name].append(compare(fresh, moved, len(tokens), plan.num_reused).mean_kl)
    means = {name: sum(values) / len(values) for name, values in kls.items()}
    assert means["all"] < 1e-6
    assert means["sampled"] < 0.7 * means["none"]
    assert means["sampled"] < 0.05


def test_little_is_computed(engine: KVBoost) -> None:
    for seed in range(21, 24):
        result = engine.generate(prompt(shuffled(seed), seed), 1)
        assert result.kv_reuse_ratio > 0.75
        assert result.reuse.actual_ms is not None and result.reuse.actual_ms <= result.ttft_ms
