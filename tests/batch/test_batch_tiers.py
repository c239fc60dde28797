"""The batch on top of disk and shared tiers: nobody waits for another's loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batching import WAIT_S, alone, answers, engine_of, greedy, mixed_prompts
from fakes import FaultyTier, words
from kvboost.errors import DeadlineExceeded
from kvboost.tiers import stack, urls

pytestmark = pytest.mark.tiny


def test_a_batch_after_a_restart_is_warm_from_disk(tmp_path: Path) -> None:
    prompts = mixed_prompts(8, seed=9)
    options = {"disk_cache_dir": str(tmp_path), "tier_deadline_ms": 60_000}
    for _ in range(2):
        with engine_of(**options, max_batch_size=3) as engine:
            tickets = [engine.submit(prompt, greedy(4)) for prompt in prompts]
            assert answers(tickets) == [alone(prompt, 4) for prompt in prompts]
            cached = sum(ticket.result().cached_tokens for ticket in tickets)
            loaded = engine.cache_stats()["loaded_chunks"]
    assert loaded > 0
    assert cached >= 0.8 * sum(map(len, prompts))


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyTier]:
    """A tier that fails on demand, behind the URL redis://, and is waited for on any machine."""
    tier = FaultyTier()
    monkeypatch.setattr(stack, "LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(urls, "_open_shared", lambda *_: tier)
    yield tier
    tier.thawed.set()


def test_who_waits_for_a_slow_tier_holds_up_nobody(below: FaultyTier) -> None:
    prompt, options = words(100), {"cache_url": "redis://here", "tier_deadline_ms": 60_000}
    with engine_of(**options) as engine:
        engine.generate(prompt, 2)
    with engine_of(**options, max_batch_size=2) as engine:
        below.fault = "frozen"
        waiting = engine.submit(prompt, greedy(4))
        late = engine.submit(prompt, greedy(4), deadline_s=0.05)
        cancelled = engine.submit(prompt, greedy(4))
        cancelled.cancel()
        quick = engine.submit(words(50), greedy(8), reuse="off")
        assert list(quick.result(WAIT_S).token_ids) == alone(words(50), 8)
        with pytest.raises(DeadlineExceeded):
            late.result(WAIT_S)
        assert not waiting.future.done()
        below.fault = ""
        below.thawed.set()
        answer = waiting.result(WAIT_S)
        assert (list(answer.token_ids), answer.cached_tokens) == (alone(prompt, 4), 99)


@pytest.mark.parametrize("fault", ["down", "corrupted", "lost"])
def test_a_broken_tier_breaks_no_request_of_a_batch(below: FaultyTier, fault: str) -> None:
    prompts = mixed_prompts(6, seed=10)
    options = {"cache_url": "redis://here", "tier_deadline_ms": 100}
    with engine_of(**options) as engine:
        for prompt in prompts:
            engine.generate(prompt, 2)
    with engine_of(**options) as engine:
        below.fault = fault
        tickets = [engine.submit(prompt, greedy(5)) for prompt in prompts]
        assert answers(tickets) == [alone(prompt, 5) for prompt in prompts]
