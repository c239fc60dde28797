"""The batch on blocks of a pool: the same answers, and every block comes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from batching import alone, answers, are_all_free, engine_of, greedy, mixed_prompts, moving_engine
from fakes import WordTokenizer, words
from kvboost import CPUPagedEngine, KVBoost
from kvboost.core import MatchKind, Sampling
from kvboost.engine.batch import batch as batch_module
from kvboost.models import cascade
from kvboost.models import rows as rows_module
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny

COMMON = words(160, seed=99)


def moved_answers(strategy: str, *, is_scattered: bool) -> list[tuple[int, ...]]:
    """Answers to prompts with documents in new places, one by one."""
    documents = [words(60, seed=seed) for seed in range(3)]
    options = {"recompute_strategy": strategy, "audit_ratio": 1.0, "promote": False}
    with moving_engine(chunk_size=16, num_blocks=120, block_size=7, **options) as engine:
        if is_scattered:  # no two free blocks follow one another
            engine._parts.pool.hold(range(0, 120, 2))
        for document in documents:
            engine.warm(document, anywhere=True, preface="5 6 7")
        results = []
        for number in range(6):
            text = documents[number % 3] + documents[(number + 1) % 3]
            prompt = words(20, seed=10 + number) + text + words(9, seed=number)
            results.append(engine.submit(prompt, greedy(12)).result(60))
            engine.flush()
        assert sum(result.reuse.tokens(MatchKind.MOVED) for result in results) >= 500
        assert engine.cache_stats()["audits"] >= 3
        return [result.token_ids for result in results]


@pytest.mark.parametrize("strategy", ["sampled", "cacheblend", "query"])
def test_moved_text_in_scattered_blocks_is_as_in_one_run(strategy: str) -> None:
    wanted = moved_answers(strategy, is_scattered=False)
    assert moved_answers(strategy, is_scattered=True) == wanted


@pytest.mark.parametrize(("short_bytes", "most_calls"), [(2**18, 1), (0, 20)])
def test_short_runs_are_attended_to_as_one(
    short_bytes: int, most_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a full pool lie anywhere; a kernel for each would cost more than a copy."""
    prompts = [words(300, seed=seed) for seed in range(2)]
    wanted = [alone(prompt, 8) for prompt in prompts]
    monkeypatch.setattr(rows_module, "SHORT_RUN_BYTES", short_bytes)
    calls: Counter[str] = Counter()
    attend = cascade.attend

    def counted(query: torch.Tensor, *args: Any, **how: Any) -> cascade.Part:
        calls["of one token"] += query.shape[2] == 1
        return attend(query, *args, **how)

    monkeypatch.setattr(cascade, "attend", counted)
    with engine_of(num_blocks=160, block_size=16) as engine:
        engine._parts.pool.hold(range(0, 160, 2))
        tickets = [engine.submit(prompt, greedy(8)) for prompt in prompts]
        assert answers(tickets) == wanted
        num_layers = engine._parts.pool.geometry.num_layers
    num_tokens = 8 * len(prompts)
    assert calls["of one token"] <= most_calls * num_tokens * num_layers
    assert most_calls == 1 or calls["of one token"] > 8 * num_tokens * num_layers


def test_requests_that_begin_alike_hold_the_same_blocks() -> None:
    seen: list[dict[str, int]] = []
    with engine_of(num_blocks=80) as engine:
        engine.submit(COMMON + words(5, seed=1), greedy(12)).result(60)
        tickets = [
            engine.submit(
                COMMON + words(5, seed=number),
                greedy(12),
                listener=lambda _: seen.append(engine._parts.pool.stats()),
            )
            for number in range(6)
        ]
        for ticket in tickets:
            ticket.result(60)
        most = max(seen, key=lambda stats: stats["saved_blocks"])
        # Ten blocks of what they share, once, and two for each one's own.
        assert most["used_blocks"] <= 10 + 6 * 2
        assert most["saved_blocks"] >= 5 * 10
        assert most["used_bytes"] == most["used_blocks"] * most["block_bytes"]
        assert are_all_free(engine)


def break_a_step(engine: KVBoost, patch: pytest.MonkeyPatch) -> None:
    def fail(segments: Any) -> Any:
        raise RuntimeError("no")

    patch.setattr(engine._parts.model, "forward_packed", fail)


def break_a_start(engine: KVBoost, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no")

    patch.setattr(batch_module, "fill", fail)


@pytest.mark.parametrize("fault", [break_a_step, break_a_start])
def test_requests_that_fail_give_their_blocks_back(
    fault: Callable[[KVBoost, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = mixed_prompts(6)
    wanted = [alone(prompt, 12) for prompt in prompts]
    with engine_of(num_blocks=64) as engine:
        with monkeypatch.context() as patch:
            fault(engine, patch)
            failed = [engine.submit(prompt, greedy(12)) for prompt in prompts]
            errors = [ticket.future.exception(60) for ticket in failed]
        assert [str(error) for error in errors] == ["no"] * len(prompts)
        assert are_all_free(engine)
        # The errors are still there, and with them all that failed: nobody may wait for it.
        tickets = [engine.submit(prompt, greedy(12)) for prompt in prompts]
        assert answers(tickets) == wanted


def test_random_traffic_never_runs_out_of_blocks() -> None:
    chance = random.Random(3)
    prompts = mixed_prompts(40, seed=3)
    with engine_of(block_size=5, num_blocks=70, max_batch_size=8) as engine:
        tickets = []
        for prompt in prompts:
            most = chance.choice([1, 4, 30, 90])
            tickets.append(engine.submit(prompt, Sampling(max_new_tokens=most, ignore_eos=True)))
            if chance.random() < 0.3:
                chance.choice(tickets).cancel()
        errors = [ticket.future.exception(120) for ticket in tickets]
        assert {type(error) for error in errors} <= {type(None), CancelledError}
        assert are_all_free(engine)


def test_a_paged_engine_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(*SUPPORTED["llama"])
    monkeypatch.setattr("kvboost.engine.engine.load_or_tell", lambda *_: (model, WordTokenizer()))
    with CPUPagedEngine.from_pretrained("any", num_blocks=40, block_size=8) as engine:
        stats = engine.paged_stats()
        assert (stats["num_blocks"], stats["block_size"], stats["used_blocks"]) == (40, 8, 0)
        per_token = engine._parts.model.geometry.bytes_per_token
        assert stats["pool_bytes"] == 40 * 8 * per_token
        assert engine.batch_stats()["kv_capacity_tokens"] == 320
        first, second = engine.generate_batch([COMMON, COMMON], max_new_tokens=4)
        assert first.token_ids == second.token_ids
        assert are_all_free(engine)


def test_the_backend_of_a_paged_engine_cannot_be_another() -> None:
    with pytest.raises(TypeError, match="backend"):
        CPUPagedEngine(build(*SUPPORTED["llama"]), WordTokenizer(), backend="auto")
