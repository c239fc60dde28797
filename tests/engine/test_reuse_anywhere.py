"""The engine with reuse="auto": moved text, its report, its audits, and what it must never do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batching import DOCUMENTS, about, check_stored_prefixes, engine_of, moving_engine
from fakes import words
from kvboost import ConfigError, KVBoost
from kvboost.config import STRATEGIES
from kvboost.core import MatchKind, Provenance, Span
from kvboost.engine.prefill import Terms, complete, prefill
from kvboost.models import certify
from kvboost.policy.cost import Work
from kvboost.policy.guard import NUM_TRIALS
from kvboost.tiers import anchors

pytestmark = pytest.mark.tiny


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with moving_engine() as made:
        yield made


MODES = ("off", "exact", "auto")


@pytest.mark.parametrize(
    "name", ["llama", "mistral-sliding", "gemma2-softcap", "deepseek_v3-mla", "qwen2"]
)
def test_documents_are_reused_in_any_order_and_the_answer_is_a_full_one_at_ratio_1(
    name: str,
) -> None:
    with moving_engine(name, recompute_ratio=1.0) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        for seed, order in enumerate(([3, 1, 0, 2], [2, 0]), 1):
            tokens = about(order, seed)
            result = engine.generate(tokens, 8)
            assert result.reuse.tokens(MatchKind.MOVED) >= sum(len(DOCUMENTS[i]) for i in order)
            assert result.token_ids == engine.generate(tokens, 8, reuse="off").token_ids


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_answers_and_counts(strategy: str) -> None:
    with moving_engine(recompute_strategy=strategy) as engine:
        engine.warm([" ".join(map(str, document)) for document in DOCUMENTS], preface="9 9 9 9")
        result = engine.generate(about([1, 3, 0], 1), 4)
        moved = result.reuse.tokens(MatchKind.MOVED)
        assert moved >= sum(len(DOCUMENTS[i]) for i in (1, 3, 0))
        assert result.cached_tokens == moved - result.reuse.repaired_tokens
        assert (result.reuse.repaired_tokens == 0) == (strategy == "none")
        stats = engine.cache_stats()
        assert stats["moved_tokens"] == moved
        assert stats["approximate_hits"] == stats["moved_hits"] > 0


def test_exact_requests_see_nothing_of_moved_ones(engine: KVBoost) -> None:
    engine.generate(about([0, 1, 2], 0), 1)
    tokens = about([2, 1, 0], 1)
    engine.generate(tokens, 8)
    exact = engine.generate(tokens, 8, reuse="exact")
    assert exact.reuse.tokens(MatchKind.MOVED) == 0
    assert exact.token_ids == engine.generate(tokens, 8, reuse="off").token_ids


def test_with_same_company_a_planted_neighbour_changes_nothing() -> None:
    """The preface of both prompts is the same; what stands between differs."""
    planted, clean = words(40, 90), [*words(12, 91), *DOCUMENTS[0], *words(15, 92)]
    first = [*words(12, 91), *planted, *DOCUMENTS[0], *words(15, 93)]
    for company in ("any", "same"):
        options = {"company": company, "recompute_strategy": "none"}
        with moving_engine(**options, promote=False) as engine:
            engine.generate(first, 1)
            result = engine.generate(clean, 8)
            if company == "any":
                assert result.reuse.tokens(MatchKind.MOVED) >= len(DOCUMENTS[0])
                check = engine.verify_correctness([first, clean], reuse="auto").checks[0]
                assert check.mean_kl > 1e-6
            else:
                assert result.reuse.tokens(MatchKind.MOVED) == 0
                assert result.token_ids == engine.generate(clean, 8, reuse="off").token_ids


def test_with_same_company_documents_in_another_order_are_reused() -> None:
    with moving_engine(company="same") as engine:
        engine.generate([*words(12, 91), *about([0, 1, 2], 0)[12:]], 1)
        other = engine.generate([*words(12, 91), *about([2, 0, 1], 1)[12:]], 1)
        assert other.reuse.tokens(MatchKind.MOVED) > 300


def test_new_text_between_moved_texts_is_stored_and_found_again(engine: KVBoost) -> None:
    new = words(120, 77)
    engine.generate(about([0, 1], 0), 1)
    engine.generate(words(9, 1) + DOCUMENTS[1] + new + DOCUMENTS[0] + words(9, 2), 1)
    result = engine.generate(words(30, 3) + new + words(9, 4), 1)
    assert result.reuse.tokens(MatchKind.MOVED) >= len(new)
    index, space = engine._parts.store.index, engine._parts.store.index.spaces()[0]
    _, hashes = anchors.pick(np.array(new, "<u4"), anchors.salt(space))
    found = [seen for anchor in hashes.tolist() for seen in index.sightings(anchor, space)]
    kinds = {entry.provenance for entry, _ in found}
    assert kinds == {Provenance.APPROXIMATE}


def test_what_is_computed_on_approximate_text_is_not_stored(engine: KVBoost) -> None:
    """Errors would add up with every move: what is stored is at most one move from exact."""
    first, second, third = (words(120, seed) for seed in (71, 72, 73))
    engine.generate(first, 1)
    engine.generate(words(9, 1) + first + second, 1)  # the second one on top of a moved text
    engine.generate(words(9, 2) + second + third, 1)  # the third one on top of that
    moved = engine.generate(words(9, 3) + second + third, 1).reuse.tokens(MatchKind.MOVED)
    assert len(second) <= moved < len(second) + 20
    engine.generate(words(9, 4) + first + third, 1)  # and here on top of exact K/V, moved once
    moved = engine.generate(words(9, 5) + second + third, 1).reuse.tokens(MatchKind.MOVED)
    assert moved >= len(second) + len(third) - 1


def test_moved_text_is_not_stored_a_second_time() -> None:
    with moving_engine(promote=False) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        engine.flush()
        before = engine.cache_stats()["hot_memory_mb"]
        for seed in range(1, 6):
            engine.generate(about(random.Random(seed).sample(range(4), 4), seed), 1)
        engine.flush()
        assert engine.cache_stats()["hot_memory_mb"] < 1.3 * before


def test_audits_find_a_bad_strategy_and_the_engine_falls_back_to_exact() -> None:
    options = {"recompute_strategy": "none", "quality_budget": 1e-5}
    with moving_engine(**options) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        notes = []
        for seed in range(1, NUM_TRIALS + 2):
            order = random.Random(seed).sample(range(4), 4)
            result = engine.generate(about(order, seed), 6)
            notes.append(result.reuse.note)
            engine.flush()
        assert result.reuse.tokens(MatchKind.MOVED) == 0
        assert "no longer reused" in notes[-1]
        assert notes[:NUM_TRIALS] == [""] * NUM_TRIALS
        quality = engine.cache_stats()["quality"][""]
        assert quality["audits"] == NUM_TRIALS
        assert not quality["moved_allowed"]
        assert engine.generate(about([1, 0], 50), 1, tenant="new").reuse.note == ""


def test_audits_of_a_full_repair_find_nothing() -> None:
    with moving_engine(recompute_ratio=1.0, quality_budget=1e-4) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        for seed in range(1, NUM_TRIALS + 2):
            engine.generate(about([seed % 4, (seed + 1) % 4], seed), 6)
            engine.flush()
        quality = engine.cache_stats()["quality"][""]
        assert quality["audits"] >= NUM_TRIALS
        assert quality["mean_kl"] < 1e-6
        assert quality["mean_top1"] == 1.0


def test_a_model_that_cannot_be_moved_gets_exact_reuse_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    broken = certify.Rotations(refusal="no rotation explains how K of layer 0 moves (misfit 2)")
    monkeypatch.setattr(certify, "measure_rotations", lambda *_: broken)
    with moving_engine() as engine:
        engine.generate(about([0, 1], 0), 1)
        moved = engine.generate(about([1, 0], 1), 1)
        again = engine.generate(about([0, 1], 0), 1)
        assert moved.reuse.tokens(MatchKind.MOVED) == 0
        assert "no rotation explains" in moved.reuse.note
        assert again.reuse.tokens(MatchKind.EXACT) > 200


def test_what_would_be_slower_is_not_reused() -> None:
    with engine_of(chunk_size=32, reuse="auto", quality_budget=100.0) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        engine.flush()
        for num_rows in (100, 200, 400):
            engine._parts.cost.observe(Work.of(400, num_rows, 400 - num_rows + 1), 1000.0)
        tokens = about([3, 1], 1)
        assert "computing it is faster" in str(engine.explain(tokens).spans)
        assert engine.generate(tokens, 1).reuse.tokens(MatchKind.MOVED) == 0


def test_predicted_and_actual_times_are_reported(engine: KVBoost) -> None:
    for seed in range(3):
        engine.generate(about([0, 1, 2, 3], seed), 1)
        result = engine.generate(about([2, 3, 1], seed + 10), 1)
    report = result.reuse
    assert report.predicted_ms is not None and report.predicted_ms > 0
    assert report.full_ms is not None and report.full_ms > 0
    assert report.actual_ms is not None and report.actual_ms <= result.ttft_ms


def test_deterministic_engines_move_nothing() -> None:
    with moving_engine(deterministic=True, piece_tokens=64) as engine:
        engine.generate(about([0, 1, 2, 3], 0), 1)
        assert engine.generate(about([3, 2], 1), 1).reuse.tokens(MatchKind.MOVED) == 0


def test_beams_and_assisted_decoding_work_on_moved_text() -> None:
    with moving_engine(recompute_ratio=1.0) as engine:
        engine.generate(about([0, 1, 2], 0), 1)
        tokens = about([2, 0], 1)
        for arguments in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {}):
            result = engine.generate(tokens, 6, **arguments)
            full = engine.generate(tokens, 6, reuse="off", **arguments)
            assert result.reuse.tokens(MatchKind.MOVED) > 200
            assert result.token_ids == full.token_ids


def test_rows_between_computed_ones_are_corrected(engine: KVBoost) -> None:
    engine.generate(about([0, 1], 0), 1)
    engine.flush()
    tokens = about([1, 0], 1)
    parts = engine._parts
    prefilled = prefill(tokens, parts, Terms("auto", "", 0.15), capacity=len(tokens))
    span = Span(12 + 2, 12 + 2 + len(DOCUMENTS[1]))
    between = [p for p in range(span.start, span.stop) if p not in prefilled.repaired]
    placed = [rows[:, :, between].clone() for rows in prefilled.rows.read(Span(0, len(tokens)))]
    complete(prefilled, tokens, parts)
    after = [rows[:, :, between] for rows in prefilled.rows.read(Span(0, len(tokens)))]
    assert not all(torch.equal(a, b) for a, b in zip(placed, after, strict=True))


def test_documents_have_the_same_tokens_wherever_they_stand(engine: KVBoost) -> None:
    text = " ".join(map(str, DOCUMENTS[0]))
    engine.generate(f"5 6 7 {text} 8 9", 1, documents=[text])
    result = engine.generate(f"11 {text} 12 13", 1, documents=[text])
    assert result.reuse.tokens(MatchKind.MOVED) == len(DOCUMENTS[0])
    with pytest.raises(ConfigError, match=r"documents\[0\] is not part of the prompt"):
        engine.generate("1 2 3", 1, documents=["4"])


def test_explain_says_why(engine: KVBoost) -> None:
    engine.generate(about([0, 1], 0), 1)
    engine.generate(words(60, 5), 1, tenant="other")
    engine.flush()
    tokens = about([0, 1], 0)[:200] + words(60, 5) + DOCUMENTS[1] + words(40, 6)
    report = engine.explain(tokens, across_tenants=True)
    kinds = [each.kind for each in report.spans]
    assert kinds[:4] == [MatchKind.EXACT, MatchKind.MISS, MatchKind.MOVED, MatchKind.MISS]
    assert report.spans[0].span == Span(0, 200)
    assert report.spans[1].reason == "stored for another tenant, adapter, model or piece size"
    assert "another tenant" not in str(engine.explain(tokens).spans)  # that is nobody's business
    assert "later than when it was computed" in report.spans[2].reason
    assert report.spans[3].reason == "not seen before"
    differing = engine.explain([*about([0, 1], 0)[:90], *words(90, 7)])
    assert "the nearest stored prompt has" in differing.spans[1].reason
    assert engine.cache_stats()["requests"] == 2  # nothing was run


def test_explain_knows_what_was_evicted() -> None:
    with moving_engine(max_chunks=6) as engine:
        engine.generate(words(150, 1), 1)
        engine.generate(words(150, 2), 1)
        engine.flush()
        reasons = {each.reason for each in engine.explain(words(150, 1)).spans}
        assert "evicted" in reasons


class Provenances(RuleBasedStateMachine):
    """Whatever is asked in whatever order: a prefix key leads to what the model computes."""

    @initialize()
    def start(self) -> None:
        self.engine = moving_engine(max_chunks=60)
        self.seed = 0

    @rule(order=st.permutations(range(4)), count=st.integers(1, 4), mode=st.sampled_from(MODES))
    def ask(self, order: list[int], count: int, mode: str) -> None:
        self.seed += 1
        self.engine.generate(about(order[:count], self.seed % 3), 3, reuse=mode)

    @rule(order=st.permutations(range(4)), count=st.integers(1, 4))
    def go_on_with_an_answer(self, order: list[int], count: int) -> None:
        tokens = about(order[:count], 1)
        answer = self.engine.generate(tokens, 4).token_ids
        self.engine.generate(tokens + answer + words(6, 300), 2)

    @rule(number=st.integers(0, 3), anywhere=st.booleans())
    def warm(self, number: int, anywhere: bool) -> None:
        text = " ".join(map(str, DOCUMENTS[number]))
        self.engine.warm([text], anywhere=anywhere, preface="5 6 7 8 9 10")

    @invariant()
    def what_a_prefix_key_leads_to_is_exact(self) -> None:
        check_stored_prefixes(self.engine, most=2)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


TestProvenances = Provenances.TestCase
TestProvenances.settings = settings(max_examples=12, stateful_step_count=8, deadline=None)


def test_moved_answers_can_be_verified_on_the_users_own_prompts() -> None:
    with moving_engine(recompute_ratio=1.0, quality_budget=1e-6) as engine:
        report = engine.verify_correctness(
            [about([0, 1], 0), about([1, 0], 1), words(40, 7)], 6, reuse="auto"
        )
        assert len(report.checks) == 1  # the first has nothing to reuse, the last shares nothing
        assert report
        assert "mean KL" in str(report)
    with moving_engine(recompute_strategy="none", quality_budget=0.0) as engine:
        assert not engine.verify_correctness([about([0, 1], 0), about([1, 0], 1)], reuse="auto")
