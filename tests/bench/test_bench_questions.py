"""Questions about ours alone: traffic without a model, arithmetic, and some asked of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from kvboost.bench.questions.ask import QUESTIONS, ask_all
from kvboost.bench.questions.hits import (
    CACHE_SHARES,
    DOCUMENTS_PER_PROMPT,
    PATTERNS,
    draw,
    random_documents,
    replay,
    stored_bytes,
)
from kvboost.bench.questions.pairs import (
    First,
    break_even,
    prompts,
)
from kvboost.bench.questions.subjects import (
    NUM_DOCUMENTS,
    QUESTION_TOKENS,
    Pair,
    Subject,
    continued,
    dealt,
    layouts,
    middle,
    pick,
    share_same,
    shuffled,
)
from kvboost.errors import ConfigError
from tiny_models import save

PAIR = Pair(
    ours_ms=10.0,
    bare_ms=100.0,
    ours_total_ms=30.0,
    bare_total_ms=120.0,
    top1=1.0,
    cached_share=0.8,
    found_share=0.9,
    load_ms=1.0,
    store_ms=2.0,
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_requests_are_repeatable_and_have_no_document_twice(pattern: str) -> None:
    requests = draw(pattern, 20, 50, seed=1)
    assert requests == draw(pattern, 20, 50, seed=1) != draw(pattern, 20, 50, seed=2)
    assert {len(set(chosen)) for chosen in requests} == {DOCUMENTS_PER_PROMPT}


def test_zipf_has_favourites_and_uniform_has_none() -> None:
    def top(pattern: str) -> float:
        counts = Counter(n for chosen in draw(pattern, 50, 400, seed=0) for n in chosen)
        return counts.most_common(1)[0][1] / counts.total()

    assert top("uniform") < 0.05 < 0.12 < top("zipf")


def test_temporal_traffic_comes_back_to_what_was_used_last() -> None:
    def again(pattern: str) -> int:
        requests = draw(pattern, 100, 200, seed=0)
        return sum(len({*a} & {*b}) for a, b in pairwise(requests))

    assert again("temporal") > 3 * again("uniform")


def test_a_prompt_that_repeats_is_found_exactly() -> None:
    assert replay([[0, 1, 2]] * 6, random_documents(3, seed=0), 10**9, seed=0) == (1.0, 1.0)


def test_other_orders_are_found_but_not_exactly() -> None:
    orders = [[0, 1, 2], [0, 1, 2], [1, 2, 0], [2, 0, 1]]
    found, exact = replay(orders, random_documents(3, seed=0), 10**9, seed=0)
    assert found > 0.9
    assert exact == 0.0


def test_what_never_came_is_not_found() -> None:
    requests = [[n, n + 1, n + 2] for n in range(0, 18, 3)]
    assert replay(requests, random_documents(18, seed=0), 10**9, seed=0) == (0.0, 0.0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_larger_cache_finds_more(pattern: str) -> None:
    texts = random_documents(20, seed=0)
    requests, all_bytes = draw(pattern, 20, 60, seed=0), stored_bytes(texts)
    small, large = (replay(requests, texts, int(s * all_bytes), seed=0) for s in (0.1, 2.0))
    assert small[0] < large[0]
    assert large[0] > 0.95
    assert large[1] < large[0]


def test_hits_need_no_model() -> None:
    rows = list(islice(ask_all(Subject("none", is_quick=True), ["hits"]), 2))
    assert [row["cache_share"] for row in rows] == list(CACHE_SHARES[:2])
    assert {row["question"] for row in rows} == {"hits"}
    assert all(0 <= row["exact_hit_rate"] <= row["hit_rate"] <= 1 for row in rows)


def test_a_question_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'weather'.*length"):
        next(ask_all(Subject("none"), ["weather"]))


def test_text_is_dealt_once_and_in_another_order_for_each_seed() -> None:
    pages = [[n] * 3 for n in range(30)]
    first, second = list(dealt(pages, 0)), list(dealt(pages, 1))
    assert sorted(first) == sorted(second) == sorted(chain.from_iterable(pages))
    assert first != second
    assert first == list(dealt(pages, 0))


def test_a_seed_chooses_an_order_and_all_orders_come() -> None:
    orders = [tuple(shuffled([None, 1, 2], seed)) for seed in range(60)]
    assert orders == [tuple(shuffled([None, 1, 2], seed)) for seed in range(60)]
    assert len(set(orders)) == 6


def test_who_is_asked_first_is_drawn_and_then_changes_by_turns() -> None:
    subject = Subject("none", is_quick=True)
    firsts = [subject.is_ours_first(0, tokens, "warm") for tokens in range(100)]
    assert 25 < sum(firsts) < 75
    assert firsts == [subject.is_ours_first(2, tokens, "warm") for tokens in range(100)]
    assert firsts == [not subject.is_ours_first(1, tokens, "warm") for tokens in range(100)]


@pytest.mark.parametrize("num_tokens", [256, 513])
def test_all_text_between_preface_and_question_has_moved_in_a_second_prompt(
    num_tokens: int,
) -> None:
    first, second = layouts(iter(range(10**4)), num_tokens)
    assert len(first) == len(second) == num_tokens
    common = {*first} & {*second}
    assert len(common) == (num_tokens - 2 * QUESTION_TOKENS) // NUM_DOCUMENTS * NUM_DOCUMENTS
    assert all(first.index(token) != second.index(token) for token in common)


def test_a_continued_prompt_keeps_its_length_and_its_beginning() -> None:
    longer = continued(list(range(100)), iter(range(1000, 2000)), 0.7)
    assert longer == [*range(70), *range(1000, 1030)]


@pytest.mark.parametrize("share", [0.25, 0.95])
def test_prompts_hold_the_share_that_they_claim(share: float) -> None:
    text = list(range(1000))
    made = prompts(text, share, iter(range(5000, 9000)))
    num_kept = round(share * 1000)
    assert {len(tokens) for tokens in made.values()} == {1000}
    assert all(len({*tokens} & {*text}) == num_kept for tokens in made.values())
    assert made["warm"][:num_kept] == text[:num_kept]
    assert made["moved"][0] not in text


def test_rounds_are_joined_by_medians_of_times_and_of_their_ratios() -> None:
    slow = replace(PAIR, ours_ms=40.0, bare_ms=200.0, top1=0.5)
    late = replace(PAIR, ours_ms=90.0, bare_ms=300.0, top1=0.75)
    row = middle([PAIR, slow, late])
    assert (row["ours_ms"], row["bare_ms"], row["ratio"]) == (40.0, 200.0, 0.2)
    assert (row["top1"], row["pairs"]) == (0.75, 3)
    assert pick(row, "ratio", ttft_ms="ours_ms") == {"ratio": 0.2, "ttft_ms": 40.0}


def test_storing_has_paid_once_it_saved_what_it_took() -> None:
    first = First(prefill_ms=110.0, store_ms=50.0, bytes_per_token=1.0)
    dear, useless = replace(first, store_ms=400.0), replace(first, prefill_ms=10.0)
    assert break_even([(first, PAIR)]) == 0.5
    assert break_even([(first, PAIR), (dear, PAIR), (useless, PAIR)]) == 4.0
    assert break_even([(useless, PAIR)]) is None


def test_answers_agree_by_the_token() -> None:
    assert share_same([1, 2, 3, 4], [1, 2, 9, 4]) == 0.75


def rows_of_a_process(model: str, question: str) -> list[dict[str, Any]]:
    task = {"model": model, "dtype": "fp32", "is_quick": True, "questions": [question]}
    command = [sys.executable, "-m", "kvboost.bench.questions.ask", json.dumps(task)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert [name for name in QUESTIONS if f"{name}: " in done.stderr] == [question]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["question"] for row in rows} == {question}
    return rows


def check_shares(shares: list[dict[str, Any]]) -> None:
    assert {row["phase"] for row in shares} == {"warm", "moved"}
    for row in shares:
        assert row["ratio"] == pytest.approx(row["ours_ms"] / row["bare_ms"], rel=0.02)
        assert row["cached_share"] <= row["share"] + 0.01
        if row["phase"] == "warm":  # exact, so in fp32 the answers are the same
            assert row["top1"] == 1.0
            assert row["cached_share"] == pytest.approx(row["share"], abs=0.01)


@pytest.mark.tiny
def test_a_process_measures_shares_and_writes_rows_alone(tmp_path: Path) -> None:
    check_shares(rows_of_a_process(save(tmp_path), "share"))


@pytest.mark.model
@pytest.mark.long
def test_shares_of_a_real_model(smol: str) -> None:
    check_shares(rows_of_a_process(smol, "share"))


@pytest.mark.model
@pytest.mark.long
def test_the_more_is_repaired_the_nearer_are_the_answers(smol: str) -> None:
    repairs = {row["repair"]: row for row in rows_of_a_process(smol, "frontier")}
    least, some, full = repairs["none"], repairs["0.15"], repairs["1.0"]
    assert least["moved_share"] == some["moved_share"] == full["moved_share"] > 0.8
    assert least["computed_share"] < some["computed_share"] < full["computed_share"] == 1.0
    assert least["kl"] > full["kl"]
    assert full["kl"] < 1e-4
    assert full["top1"] == 1.0
